"""What a reader must know within ten seconds, as labelled facts that every format lays out: what, how sure, where, what cures."""

from collections.abc import Iterator
from dataclasses import dataclass

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.report.facts import CONFIDENCE, ended_with, place, watched_and_not
from dtypedoctor.report.model import Outcome, Report
from dtypedoctor.report.remedy_lines import RemedyLine, cures, outcome_words, remedy_lines
from dtypedoctor.report.text import one_line

__all__ = ["ERROR", "MODULE", "Fact", "first_screen"]

ERROR, MODULE = "error", "module"
"""Labels of the facts that quote what was raised and that name a module."""
_MOST = 6
"""Remedies that are told here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One labelled fact.

    Attributes:
        label: what it is, e.g. ``source``.
        code: a name or a message, to be shown letter by letter; empty where there is none.
        text: what is said about it, after a colon, or the fact itself where there is no ``code``.
    """

    label: str
    code: str = ""
    text: str = ""

    @property
    def joint(self) -> str:
        """What stands between ``code`` and ``text``."""
        return ": " if self.code and self.text else ""


def first_screen(report: Report) -> tuple[Fact, ...]:
    """The facts about the most important finding, in the order of a reader's questions; empty where nothing was found."""
    return tuple(_facts(report)) if report.findings else ()


def _facts(report: Report) -> Iterator[Fact]:
    finding = report.findings[0]
    if error := ended_with(report):
        yield Fact(label=ERROR, code=error)
    yield Fact(label="what", code=one_line(finding.id), text=f"{finding.severity}, {CONFIDENCE[finding.confidence]}")
    yield from (Fact(label=label, code=value) for label, value in place(finding))
    yield from (_surface(other) for other in report.findings[1:] if other.consequence_of == finding.id)
    yield from _cures(report)
    yield from _diagnoses(report)
    if same := watched_and_not(report.observer):
        yield Fact(label="unwatched", text=same)


def _surface(consequence: Finding) -> Fact:
    """Where a root cause that is no operation shows first."""
    told = dict(place(consequence))
    where = [told[label] for label in ("op", MODULE, "source") if label in told]
    return Fact(label="surfaces at", code=", ".join(where))


def _cures(report: Report) -> Iterator[Fact]:
    told = cures(report)[:_MOST]
    yield from (_remedy("or by" if position else "cured by", line) for position, line in enumerate(told))
    if told:
        return
    if any(trial.outcome is not Outcome.NOT_TRIED and trial.diagnostic is None for trial in report.trials):
        yield Fact(label="cured by", text="none of the remedies tried")
        return
    untried = [line for line in remedy_lines(report) if line.outcome == "not tried"][:_MOST]
    yield from (_remedy("or" if position else "proposed, not tried", line) for position, line in enumerate(untried))
    if not untried:
        yield Fact(label="cured by", text="nothing that dtypedoctor can put in; the finding's page says what to change")


def _diagnoses(report: Report) -> Iterator[Fact]:
    """What runs under other conditions have said of the failure."""
    for trial in report.trials:
        if trial.diagnostic is not None and trial.diagnostic.bearing is not None:
            yield Fact(
                label="under", code=one_line(trial.remedy), text=f"it {outcome_words(trial)}; a diagnosis, no cure"
            )


def _remedy(label: str, line: RemedyLine) -> Fact:
    said = (line.change.rstrip("."), f"({line.result})" if line.result else "")
    return Fact(label=label, code=one_line(line.id), text=" ".join(filter(None, said)))
