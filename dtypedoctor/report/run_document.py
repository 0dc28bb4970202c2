"""The document about a run: what failed, where, how sure, what fixes it, and why all that may be believed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding, Link, Severity
from dtypedoctor.dtypes import short_name
from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.before_after import before_after
from dtypedoctor.report.bisection import bisection_part
from dtypedoctor.report.document import (
    Beside,
    Block,
    Check,
    Code,
    Document,
    Facts,
    Fold,
    Heading,
    Items,
    Line,
    Look,
    Map,
    Outcome,
    Paragraph,
    Section,
    Table,
    Words,
    named,
)
from dtypedoctor.report.environment import ELSEWHERE, environment_rows, environment_table, reproduction_script
from dtypedoctor.report.fixes import cures, fix_checks, fixes_part
from dtypedoctor.report.magnitude_table import magnitude_section
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.run_facts import (
    CONFIDENCE,
    chains,
    link_dtypes,
    measured_sentence,
    observer_sentence,
    place,
    proven_means,
    raw_sentence,
    run_title,
    status_word,
    summary_facts,
    title,
)
from dtypedoctor.report.text import ABSENT, counted
from dtypedoctor.report.to_json import report_data

_AS_EXPECTED = {True: "As expected: ", False: "UNEXPECTED: ", None: "Expectation not judged: "}
_MOST_CHANGES, _MOST_IN_FULL = 300, 12
"""Dtype changes that are listed, and findings that are told in full."""


def run_document(report: Report) -> Document:
    """Everything that is said about a run; sections that have nothing to say are left out."""
    parts = (
        _verdict(report),
        fixes_part(report),
        before_after(report),
        _map(report) if report.pictures else magnitude_section(report),
        _flow(report),
        bisection_part(report),
        _trust(report),
        _reproduce(report),
    )
    ran = run_title(report)
    return Document(
        name=report.name,
        headline=report.headline,
        status=status_word(report),
        good=report.status is Status.HEALTHY,
        about=f"scenario {report.name}" + (f": {ran}" if ran else ""),
        labels=tuple(_labels(report)),
        sections=tuple(part for part in parts if part.blocks),
        checks=tuple(_checks(report)),
        next_command=report.next_command,
        data=lambda: report_data(report),
    )


def public_run(report: Report) -> Document:
    """The same without what must not stand in a public ticket."""
    return run_document(redact(report))


def bisection_document(report: Report) -> Document:
    """What a bisection found; the diagnosis besides is in :func:`run_document`."""
    parts = (bisection_part(report), _trust(report))
    return replace(
        run_document(report),
        status="",
        labels=(),
        good=True if (report.bisection or {}).get("end") == "healthy" else None,
        sections=tuple(part for part in parts if part.blocks),
    )


def _labels(report: Report) -> Iterator[Words]:
    """How sure the most important finding is, and how many safe fixes it has."""
    if report.findings:
        yield Words(report.findings[0].confidence.upper())
        cured = sum(line.safe for line in cures(report))
        if cured:
            yield Words(counted(cured, "SAFE FIX", "SAFE FIXES"), Look.GOOD)


def _verdict(report: Report) -> Section:
    """The facts of the most important finding beside its story, then the other findings."""
    if not report.findings:
        return Section("", (), anchor="verdict")
    meaning = proven_means(report)
    facts: tuple[Block, ...] = (Facts(summary_facts(report)), *([Paragraph(meaning, Look.DIM)] if meaning else []))
    others = report.findings[1:]
    folds = [
        _folded(finding, f"{at} of {len(report.findings)}") for at, finding in enumerate(others[:_MOST_IN_FULL], 2)
    ]
    rest = others[_MOST_IN_FULL:]
    return Section("", (Beside(facts, _story(report.findings[0])), *folds, *_briefly(rest)), "verdict", "Verdict")


def _folded(finding: Finding, position: str) -> Fold:
    sure = f"{finding.severity}, {CONFIDENCE[finding.confidence]}"
    facts: list[tuple[str, Line]] = [("what", (named(finding.id), f": {sure}"))]
    facts += [(label, named(value)) for label, value in place(finding)]
    head = (f"Finding {position}: ", named(finding.id), f" {title(finding)}")
    return Fold(head, (Beside((Facts(tuple(facts)),), _story(finding)),))


def _briefly(findings: Sequence[Finding]) -> Iterator[Fold]:
    rows = tuple((named(f.id), str(f.severity), named(f.fqn or ABSENT), f.summary) for f in findings)
    if rows:
        table = Table(("id", "severity", "module", "summary"), rows)
        yield Fold(f"{len(rows)} more findings: less severe, or consequences", (table,))


def _story(finding: Finding) -> tuple[Block, ...]:
    """Cause, evidence, where the dtypes came from, and where else it was seen."""
    blocks: list[Block] = [Heading("cause"), Paragraph(finding.cause)]
    if finding.evidence:
        blocks += [Heading("evidence"), Items(finding.evidence)]
    for about, links in chains(finding):
        blocks += [Heading(about), Items(tuple(map(_link, links)), chain=True)]
    if finding.references:
        elsewhere = tuple(Words(url, Look.LINK) for url in finding.references)
        blocks += [Heading("related issues"), Items(elsewhere)]
    return tuple(blocks)


def _link(link: Link) -> Line:
    source = (Words(f", {link.source}", Look.DIM),) if link.source else ()
    return (
        Words(link_dtypes(link), Look.STRONG),
        ": ",
        named(link.op),
        " in ",
        named(link.fqn or "(no module)"),
        *source,
    )


def _map(report: Report) -> Section:
    intro = (
        "Each row is a module, each column a step. Color: the largest element on the log scale of its own dtype, from the "
        "smallest normal value to the max; inf and NaN are hatched."
    )
    blocks = (Paragraph(intro, Look.DIM), Map(report.pictures, report.findings))
    return Section("Magnitudes, module by module", blocks, "map", "Magnitudes")


def _flow(report: Report) -> Section:
    """Every module that outputs another floating-point dtype than its input's, and what changes it."""
    heading = "Dtype changes"
    if not report.pictures:
        return Section(heading, ())
    phases: dict[tuple[str, ...], list[str]] = {}  # one row for all phases in which the same happens
    for module in report.pictures[0].modules:
        for change in (one for one in module.flows if one.why):
            key = (module.fqn or module.cls, module.cls, _dtypes(change.inputs), _dtypes(change.outputs), change.why)
            phases.setdefault(key, []).append(change.phase)
    rows = tuple(
        (Words(fqn, Look.MODULE), cls, ", ".join(dict.fromkeys(when)), into, out, why)
        for (fqn, cls, into, out, why), when in phases.items()
    )
    if not rows:
        none = Paragraph("No module outputs a floating-point dtype other than that of its input.")
        return Section(heading, (none,), "flow", "Dtype flow")
    label = f"Run: {report.pictures[0].label}"
    blocks: list[Block] = [Table(("module", "class", "phase", "in", "out", "why"), rows[:_MOST_CHANGES], label)]
    if len(rows) > _MOST_CHANGES:
        blocks.append(Paragraph(f"{len(rows) - _MOST_CHANGES} more are in the trace.", Look.DIM))
    return Section(heading, tuple(blocks), "flow", "Dtype flow")


def _dtypes(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(map(short_name, names))) or ABSENT


def _trust(report: Report) -> Section:
    """Observer certificate, expectation, and what was not covered."""
    sentences = (observer_sentence(report.observer), measured_sentence(report), raw_sentence(report))
    blocks: list[Block] = [Paragraph(sentence) for sentence in sentences if sentence]
    if report.expectation:
        blocks.append(Paragraph((Words(_AS_EXPECTED[report.expectation_met], Look.STRONG), report.expectation)))
    if report.coverage:
        blocks += [Heading("not covered"), Items(report.coverage)]
    notes = [(picture.label, note) for picture in report.pictures for note in picture.notes]
    if notes:
        noted: tuple[Line, ...] = tuple((Words(f"{label}: ", Look.STRONG), note) for label, note in notes)
        blocks += [Heading("events of the runs"), Items(noted)]
    return Section("Can this be trusted?", tuple(blocks), "trust", "Trust")


def _reproduce(report: Report) -> Section:
    """The exact command, a script for another machine, the environment."""
    blocks: list[Block] = [Code(report.command, "sh")] if report.command else []
    if script := reproduction_script(report):
        blocks.append(Fold(ELSEWHERE, (Code(script, "sh"),), brief=""))
    rows = environment_rows(report.environment)
    if rows:
        brief = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in rows)
        blocks.append(Fold("Environment", (environment_table(report.environment),), brief=brief))
    return Section("Reproduce", tuple(blocks), "reproduce")


def _checks(report: Report) -> Iterator[Check]:
    """What makes the command line exit with something else than 0.

    That is findings that no expectation announced, an expectation that did not come true, a worker that died. A remedy that was
    not tried, or tried without success, is skipped.
    """
    as_expected = report.expectation_met is True
    broken = report.status in (Status.WORKER_DIED, Status.ERROR, Status.UNKNOWN) and not as_expected
    before = report.before
    yield Check(
        name="run",
        outcome=Outcome.ERROR if broken else Outcome.PASSED,
        kind=report.status.value,
        message=report.headline,
        text=report.headline,
        seconds=(before.step_time or 0.0) * before.steps_completed if before else 0.0,
    )
    for finding in report.findings:
        harmless = finding.severity is Severity.INFO or as_expected
        yield Check(
            name=f"finding {finding.id}",
            outcome=Outcome.PASSED if harmless else Outcome.FAILED,
            kind=finding.id,
            message=finding.summary,
            text="\n".join(_in_lines(finding)),
        )
    yield from fix_checks(report)
    if report.expectation_met is not None:
        yield Check(
            name="expectation",
            outcome=Outcome.PASSED if as_expected else Outcome.FAILED,
            kind="expectation",
            message=report.expectation,
            text=report.expectation if as_expected else "",
        )


def _in_lines(finding: Finding) -> Iterator[str]:
    yield from (finding.summary, f"{finding.severity}, {CONFIDENCE[finding.confidence]}")
    yield from (f"{label}: {value}" for label, value in place(finding))
    yield f"cause: {finding.cause}"
    yield from (f"- {item}" for item in finding.evidence)
