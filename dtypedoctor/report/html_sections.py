"""The parts of the HTML page that need no script."""

from collections.abc import Iterator, Sequence

from dtypedoctor.diagnosis.finding import Finding, Link
from dtypedoctor.dtypes import short_name
from dtypedoctor.report.elements import Html, el, join, table
from dtypedoctor.report.facts import (
    CONFIDENCE,
    chains,
    ended_with,
    environment_rows,
    link_dtypes,
    measured_sentence,
    observer_sentence,
    place,
    proven_means,
    raw_sentence,
    status_word,
    title,
)
from dtypedoctor.report.first_screen import ERROR, MODULE, Fact, first_screen
from dtypedoctor.report.model import Report
from dtypedoctor.report.numbers import ABSENT, counted
from dtypedoctor.report.remedy_lines import cures
from dtypedoctor.report.reproduction import ELSEWHERE, reproduction_script
from dtypedoctor.report.strip import StripLine, scale_caption, strip_lines, strip_title
from dtypedoctor.report.text import one_line
from dtypedoctor.report.what_ran import what_ran

__all__ = ["flow", "reproduce", "strip", "trust", "verdict"]

_MOST_CHANGES = 300


def verdict(report: Report) -> Html:
    """What failed, where, how sure, what cures it; then cause and evidence of every finding."""
    pills = [el("span", status_word(report), class_=f"pill {report.status.value}"), *_pills(report)]
    ran = what_ran(report)
    head = el(
        "header",
        el(
            "p",
            *(join((pill, " ")) for pill in pills),
            el("span", one_line(report.name) + (f": {ran}" if ran else ""), class_="dim"),
        ),
        el("h1", one_line(report.headline, 600)),
        el("p", el("code", ended_with(report)), class_="raised") if ended_with(report) else Html(),
        el("p", meaning, class_="dim") if (meaning := proven_means(report)) else Html(),
    )
    return el("section", head, _first_finding(report), *map(_finding, report.findings[1:]), id="verdict", class_="card")


def _pills(report: Report) -> Iterator[Html]:
    """How sure the most important finding is, and how many remedies cure it and keep the meaning of the run."""
    if not report.findings:
        return
    yield el("span", report.findings[0].confidence.upper(), class_="pill plain")
    cured = sum(line.safe for line in cures(report))
    if cured:
        yield el("span", f"CURED BY {counted(cured, 'REMEDY', 'REMEDIES')}", class_="pill good")


def _first_finding(report: Report) -> Html:
    """The facts of the first screen beside the story of the finding that they are about."""
    shown = [fact for fact in first_screen(report) if fact.label != ERROR]  # the error stands above
    if not shown:
        return Html()
    goto = _goto if report.pictures else _name
    facts = [(fact.label, goto(fact.code) if fact.label == MODULE else _fact(fact)) for fact in shown]
    return el("div", _facts(facts), _story(report.findings[0]), class_="finding")


def _finding(finding: Finding) -> Html:
    """Another finding, folded away under its title."""
    facts = [
        ("what", join((_name(finding.id), f": {finding.severity}, {CONFIDENCE[finding.confidence]}"))),
        *((label, _name(value)) for label, value in place(finding)),
    ]
    return el(
        "details",
        el("summary", _name(finding.id), " ", one_line(title(finding), 300)),
        el("div", _facts(facts), _story(finding), class_="finding"),
    )


def _facts(facts: Sequence[tuple[str, Html]]) -> Html:
    return el("dl", *(join((el("dt", label), el("dd", value))) for label, value in facts), class_="facts")


def _fact(fact: Fact) -> Html:
    return join((_name(fact.code) if fact.code else Html(), fact.joint, fact.text))


def _name(name: str) -> Html:
    return el("code", one_line(name))


def _story(finding: Finding) -> Html:
    """Cause, evidence, where the dtypes came from, and where else it was seen."""
    parts = [el("h3", "Cause"), el("p", finding.cause)]
    if finding.evidence:
        parts += [el("h3", "Evidence"), el("ul", *(el("li", one_line(item, 1000)) for item in finding.evidence))]
    for about, links in chains(finding):
        parts += [el("h3", about.capitalize()), el("ol", *map(_link_of_chain, links), class_="chain")]
    if finding.references:
        elsewhere = el("ul", *(el("li", _reference(url)) for url in finding.references))
        parts += [el("h3", "The same failure elsewhere"), elsewhere]
    return el("div", *parts, class_="story")


def _link_of_chain(link: Link) -> Html:
    return el(
        "li",
        el("strong", link_dtypes(link)),
        " ",
        el("span", one_line(link.op), class_="dim"),
        " ",
        _name(link.fqn or "(no module)"),
        " ",
        el("span", one_line(link.source or ""), class_="dim"),
    )


def _goto(fqn: str) -> Html:
    """The name of a module, which the script makes lead to the module's row."""
    return el(
        "button", el("code", fqn), " ", el("span", "show", class_="dim"), type="button", class_="goto", data_fqn=fqn
    )


def _reference(url: str) -> Html:
    shown = one_line(url, 300)
    return (
        el("a", shown, href=url, rel="noreferrer noopener")
        if url.startswith("https://") and url == shown
        else join((shown,))
    )


def strip(report: Report) -> Html:
    """The dtype-and-magnitude strip around the origin, which needs no trace."""
    lines = strip_lines(report.strip)
    if not lines:
        return Html()
    rows = [
        [el("code", one_line(line.name)), one_line(line.dtype, 20), line.absmax, _bar(line), _note(line)]
        for line in lines
    ]
    about = strip_title(report.strip).removeprefix("Magnitudes ")
    shown = table(["module", "dtype", "absmax", "of its range", ""], rows, f"Modules {about}, in execution order")
    return el(
        "section",
        el("h2", about[:1].upper() + about[1:]),
        shown,
        el("p", scale_caption(report.strip), class_="dim"),
        id="strip",
        class_="card",
    )


def _bar(line: StripLine) -> Html:
    if line.fill is None:
        return Html(ABSENT)
    level = "bad" if line.note else f"l{min(9, int(line.fill * 10))}"
    full = el("rect", width=f"{line.fill * 100:.1f}", height="10", class_=f"cell {level}")
    return el(
        "svg",
        el("rect", width="100", height="10", class_="track"),
        full,
        viewBox="0 0 100 10",
        class_="bar",
        aria_hidden="true",
    )


def _note(line: StripLine) -> Html:
    return el("strong", line.note, class_="warn") if line.note else Html()


def flow(report: Report) -> Html:
    """Every module that hands on another floating-point dtype than it was given, and what changes it."""
    if not report.pictures:
        return Html()
    phases: dict[tuple[str, ...], list[str]] = {}  # one row for all phases in which the same happens
    for module in report.pictures[0].modules:
        for change in (one for one in module.flows if one.why):
            key = (module.fqn or module.cls, module.cls, _dtypes(change.inputs), _dtypes(change.outputs), change.why)
            phases.setdefault(key, []).append(change.phase)
    changes = [
        [_goto(fqn), cls, ", ".join(dict.fromkeys(when)), into, out, why]
        for (fqn, cls, into, out, why), when in phases.items()
    ]
    rows = changes[:_MOST_CHANGES]
    parts = [el("h2", "Where the dtype changes")]
    if not rows:
        parts.append(el("p", "No module hands on a floating-point dtype other than the one it was given."))
    else:
        parts.append(table(["module", "class", "phase", "in", "out", "why"], rows, f"Run “{report.pictures[0].label}”"))
    if len(changes) > len(rows):
        parts.append(el("p", f"{len(changes) - len(rows)} more are in the trace.", class_="dim"))
    return el("section", *parts, id="flow", class_="card")


def _dtypes(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(map(short_name, names))) or ABSENT


def trust(report: Report) -> Html:
    """Observer certificate, expectation, and what was not watched."""
    parts = [el("h2", "Can this be trusted?"), el("p", observer_sentence(report.observer))]
    if measured_sentence(report):
        parts.append(el("p", measured_sentence(report)))
    if raw_sentence(report):
        parts.append(el("p", raw_sentence(report)))
    if report.expectation:
        met = {True: "met", False: "not met", None: "not judged"}[report.expectation_met]
        parts.append(el("p", el("strong", f"Expectation {met}. "), report.expectation))
    if report.coverage:
        parts += [el("h3", "Not watched"), el("ul", *(el("li", item) for item in report.coverage))]
    notes = [(picture.label, note) for picture in report.pictures for note in picture.notes]
    if notes:
        parts += [
            el("h3", "What the runs noted"),
            el("ul", *(el("li", el("strong", f"{label}: "), note) for label, note in notes)),
        ]
    return el("section", *parts, id="trust", class_="card")


def reproduce(report: Report) -> Html:
    """The exact command, a script for another machine, the environment."""
    parts = [el("h2", "Reproduce")]
    parts += [_copyable("Command", report.command, opened=True)] if report.command else []
    parts += [_copyable("Next", report.next_command, opened=True)] if report.next_command else []
    parts.append(_copyable(ELSEWHERE, reproduction_script(report)))
    rows = [[el("code", one_line(name)), one_line(value, 500)] for name, value in environment_rows(report.environment)]
    if rows:
        parts.append(el("details", el("summary", "Environment"), table([], rows, "Versions, device and variables")))
    if not any(parts[1:]):
        return Html()
    return el("section", *parts, id="reproduce", class_="card")


def _copyable(title: str, content: str, *, opened: bool = False) -> Html:
    if not content:
        return Html()
    block = el(
        "div", el("pre", el("code", content)), el("button", "Copy", type="button", class_="copy"), class_="copyable"
    )
    if opened:
        return join((el("h3", title), block))
    return el("details", el("summary", title), block)
