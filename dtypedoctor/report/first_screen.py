"""What stands on one screen after a run: verdict, where, what to do, why, what to type next; and the same for a program that reads little.

Everything else is in the report's files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from shlex import quote
from typing import Any, NamedTuple

from rich.console import Console

from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.wording import THE_RUN_ENDED
from dtypedoctor.examination.results import NOT_MADE
from dtypedoctor.report.document import (
    Block,
    Document,
    Facts,
    Heading,
    Items,
    Line,
    Look,
    Paragraph,
    Section,
    Words,
    named,
    parts_of,
)
from dtypedoctor.report.error_budget import budget_sentence
from dtypedoctor.report.fixes import ended_with
from dtypedoctor.report.run_document import expectation_line, run_document
from dtypedoctor.report.run_facts import (
    PATCH,
    diff_of,
    do_this,
    measured_sentence,
    observer_sentence,
    origins,
    proven_means,
    ranked_facts,
    where_it_shows,
)
from dtypedoctor.report.to_json import SCHEMA, Report, Status, render_data
from dtypedoctor.report.to_terminal import print_document
from dtypedoctor.text import clipped, one_line

MOST_LINES, WIDTH = 40, 100
"""Lines of a screen, counted where the console has so many columns or more."""
_MOST_OTHERS, _MOST_GAPS, _LONGEST = 3, 6, 400
"""Other findings, things that were not covered, and characters of a text: what is longer is in the files."""


class Room(NamedTuple):
    """How much of a finding is shown.

    Attributes:
        excerpt: whether the line of source is.
        evidence: how many measurements.
        edits: how many changed lines, where they are too many for a screen.
        longest: characters of a text.
    """

    excerpt: bool
    evidence: int
    edits: int
    longest: int


ROOMS = (
    Room(True, 5, 4, _LONGEST),
    Room(True, 3, 4, _LONGEST),
    Room(False, 5, 4, _LONGEST),
    Room(False, 3, 4, _LONGEST),
    Room(False, 2, 3, _LONGEST),
    Room(False, 1, 2, _LONGEST // 2),
    Room(False, 0, 2, _LONGEST // 2),
    Room(False, 0, 1, _LONGEST // 3),
    Room(False, 0, 1, _LONGEST // 5),
)
"""From much to little: the first one that fits is taken."""


def print_first_screen(report: Report, console: Console, directory: str, files: Sequence[str]) -> None:
    """Prints one screen: of the evidence and the source excerpt as much as there is room for.

    Args:
        report: what was found.
        console: where to.
        directory: the run directory, as it is typed.
        files: names of the reports that lie in it, the best one first; where there are none, all is printed.
    """
    if not files:
        print_document(run_document(report), console)
        return
    if console.is_terminal:  # the user's own; a log may be read by others
        report = replace(report, excerpts=tuple(replace(one, text=one.own or one.text) for one in report.excerpts))
    at = f"Full report: {directory}/{files[0]}" + (f" ({', '.join(files[1:])})" if len(files) > 1 else "")
    patch = quote(f"{directory}/{report.files.get('patch', PATCH)}")
    for room in ROOMS:
        page, drawn = first_screen(report, at, room, patch), StringIO()
        print_document(page, Console(file=drawn, width=max(console.width, WIDTH), no_color=True))
        if len(drawn.getvalue().splitlines()) <= MOST_LINES:
            break
    print_document(page, console)


def first_screen(report: Report, where_the_rest_is: str, room: Room = ROOMS[0], patch: str = PATCH) -> Document:
    """The document of a run, cut down to one screen.

    Args:
        report: what was found.
        where_the_rest_is: a sentence.
        room: how much of the finding is shown.
        patch: the file with all changed lines, as it is typed.
    """
    open_questions: tuple[Block, ...] = ()
    if report.coverage and not report.findings:  # where nothing was found, that is what the verdict leaves open
        gaps = tuple(clipped(text, _LONGEST) for text in report.coverage[:_MOST_GAPS])
        open_questions = (Heading("not covered"), Items(gaps))
    parts = (
        *(_about_finding(report, report.findings[0], room, patch) if report.findings else ()),
        open_questions,
        (*_trust(report), Paragraph(where_the_rest_is, Look.DIM)),
    )
    settled = bool(report.findings) and report.findings[0].confidence is Confidence.PROVEN
    return replace(
        run_document(report),
        headline=one_line(report.headline, max(3 * room.longest // 2, 300)),
        sections=tuple(Section("", tuple(blocks)) for blocks in parts if blocks),
        last_line="" if settled else report.rerun,
    )


def _about_finding(report: Report, finding: Finding, room: Room, patch: str) -> Iterator[tuple[Block, ...]]:
    """Where, what to do, why, and what else was found."""
    facts = (fact for fact in ranked_facts(report) if fact.on_screen)
    yield (Facts(tuple((fact.label, _short(fact.line, room.longest)) for fact in facts)),)
    for advice in report.do_this[:1]:
        if report.status is Status.HEALTHY:
            yield (Paragraph("It may stay as it is; the full report shows how to change it."),)
        else:
            yield do_this(replace(advice, text=clipped(advice.text, 2 * room.longest)), most=room.edits, patch=patch)
    if room.excerpt:
        yield where_it_shows(report.excerpts[:1])
    yield tuple(_why(report, finding, room))
    if others := report.findings[1:]:
        yield _also_found(others, room.longest // 2, _MOST_OTHERS if room.evidence else 0)


def _also_found(others: Sequence[Finding], longest: int, most: int) -> tuple[Block, ...]:
    """The first ones with their summaries, of the rest how many there are."""
    shown = [(named(other.id), f": {clipped(other.summary, longest)}") for other in others[:most]]
    rest = f"{len(others) - most} more in the full report"
    if not shown:
        return (Paragraph(f"Also found: {rest}."),)
    return (Heading("also found"), Items((*shown, *([rest] if len(others) > most else []))))


def _why(report: Report, finding: Finding, room: Room) -> Iterator[Block]:
    yield Heading("why")
    yield Paragraph(clipped(finding.cause, room.longest))
    if evidence := _measured(finding)[: room.evidence]:
        yield Items(tuple(clipped(text, room.longest) for text in evidence))
    if meaning := proven_means(report):
        yield Paragraph(one_line(meaning, room.longest))  # its end says what the experiment showed


def _measured(finding: Finding) -> list[str]:
    """The evidence without how the run has ended, which stands beside "noticed"."""
    return [text for text in finding.evidence if not text.startswith(THE_RUN_ENDED)]


def _short(line: Line, left: int) -> Line:
    """A fact in no more characters than are left."""
    parts = []
    for part in parts_of(line):
        text = part.text if isinstance(part, Words) else str(part)
        parts.append(replace(part, text=one_line(text, left)) if isinstance(part, Words) else one_line(text, left))
        left = max(left - len(text), 1)
    return tuple(parts)


def _trust(report: Report) -> Iterator[Block]:
    """What changes how the verdict is to be taken: an expectation, a run that instrumentation changed or that was asked for in vain, how much was measured."""
    if report.expectation:
        yield Paragraph(expectation_line(report))
    if report.observer.bitwise_equal is False:
        yield Paragraph(clipped(observer_sentence(report.observer), _LONGEST))
    if not_made := next((gap for gap in report.coverage if NOT_MADE in gap), ""):
        yield Paragraph(clipped(f"{not_made[:1].upper()}{not_made[1:]}.", _LONGEST))
    if budget := budget_sentence(report.error_budget):
        yield Paragraph(budget)
    if measured := measured_sentence(report):
        yield Paragraph(measured, Look.DIM)


BRIEF = 2048
"""Bytes that a brief report has at most, as JSON."""


def brief(report: Report) -> Document:
    """Make the document of a run whose data are what an agent reads first: the headline, where it began, the edit, the next command.

    The keys are always the same and in this order; texts are shortened until all fit into :data:`BRIEF` bytes. An edit is whole or
    left out (None): half of one could not be applied, and the patch in the run directory has it.
    """
    document = run_document(report)
    for longest in (300, 200, 130, 80, 40):
        for shown_edit in (True, False):
            data = _brief_data(report, longest, with_edit=shown_edit)
            fitting = replace(document, data=lambda data=data: data)  # type: ignore[misc]
            if len(render_data(fitting)) <= BRIEF:
                return fitting
    return fitting


def _brief_data(report: Report, longest: int, *, with_edit: bool) -> Mapping[str, Any]:
    """The data of a brief report, with texts of at most so many characters."""
    first = report.findings[0] if report.findings else None
    advice = report.do_this[0] if report.do_this and report.status is not Status.HEALTHY else None
    edit = (diff_of(advice.edits) or advice.code) if advice else ""
    others = [f"{finding.id} at {finding.source or finding.fqn}" for finding in report.findings[1:]]
    return {
        "schema": SCHEMA,
        "status": report.status.value,
        "headline": one_line(report.headline, longest),
        "finding": first.id if first else None,
        "confidence": first.confidence.value if first else None,
        "origin": [one_line(line, longest) for line in (origins(first) if first else [])[:3]],
        "noticed": one_line(report.noticed or ended_with(report), longest),
        "why": clipped((first.proven_by and f"proven: {first.proven_by}") or first.cause, longest) if first else "",
        "evidence": [clipped(text, longest // 2) for text in _measured(first)[:_MOST_OTHERS]] if first else [],
        "do_this": clipped(advice.text, longest) if advice else "",
        "edit": edit if edit and with_edit else None,
        "tried": advice.tried if edit and advice else None,
        "also_found": [one_line(other, longest // 2) for other in others[:_MOST_OTHERS]],
        "not_covered": [clipped(gap, longest // 2) for gap in report.coverage[:_MOST_OTHERS]] if first is None else [],
        "next": one_line(report.next_command, 2 * longest),
    }
