"""The document about a run or a bisection: what failed, where, how sure, what fixes it, and why all that may be believed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtypedoctor.diagnosis.rule import Finding, Link, Severity
from dtypedoctor.diagnosis.wording import indexed, module_name
from dtypedoctor.dtypes import short_name
from dtypedoctor.examination.results import REPLAYED
from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.document import (
    Bar,
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
    Outcome,
    Paragraph,
    Section,
    Table,
    Words,
    named,
)
from dtypedoctor.report.error_budget import budget_section
from dtypedoctor.report.fixes import before_after, cures, fix_checks, fixes_part, replay_command, seconds_of
from dtypedoctor.report.precisions import precisions_section
from dtypedoctor.report.run_facts import (
    CONFIDENCE,
    chains,
    do_this,
    link_dtypes,
    measured_sentence,
    observer_sentence,
    place,
    proven_means,
    ranked_facts,
    raw_sentence,
    replay_title,
    run_title,
    status_word,
    title,
    what,
    where_it_shows,
)
from dtypedoctor.report.surveys import environment_rows, environment_table
from dtypedoctor.report.to_json import Report, Status, StripRow, report_data
from dtypedoctor.text import ABSENT, count, counted, duration, fill, limit, memory, number, one_line, ratio

_AS_EXPECTED = {True: "As expected: ", False: "UNEXPECTED: ", None: "Expectation not judged: "}
_MOST_IN_FULL = 12
"""Findings that are told in full."""


def run_document(report: Report) -> Document:
    """Everything that is said about a run; sections that have nothing to say are left out."""
    parts = (
        _verdict(report),
        fixes_part(report),
        before_after(report),
        magnitude_section(report),
        budget_section(report.error_budget),
        precisions_section(report.precisions),
        bisection_part(report),
        _trust(report),
        _reproduce(report),
    )
    runs_again = "dtypedoctor exec " in report.next_command and not report.next_command.startswith("patch ")
    # How sure the most important finding is, and how many safe fixes it has
    labels = tuple(Words(finding.confidence.upper()) for finding in report.findings[:1])
    if labels and (cured := sum(line.safe for line in cures(report))):
        labels += (Words(counted(cured, "SAFE FIX", "SAFE FIXES"), Look.GOOD),)
    return Document(
        name=report.name,
        headline=report.headline,
        status=status_word(report),
        good=report.status is Status.HEALTHY,
        about=_about(report) if report.replay is None else replay_title(report),
        labels=labels,
        sections=tuple(part for part in parts if part.blocks),
        checks=tuple(_checks(report)),
        next_command=report.next_command,
        next_title="Next, after the edit above" if runs_again and report.asks_for_edit else "Next",
        last_line=report.rerun,
        data=lambda: report_data(report),
    )


def _about(report: Report) -> str:
    """What ran, and how its calls are counted where they are counted in the place of steps."""
    ran = run_title(report)
    what = f"scenario {report.name}" + (f": {ran}" if ran else "")
    if ran.startswith("script"):
        what = f"script {report.name}" + ran.removeprefix("script").replace("; on", " on", 1)
    counted_by_call = any(finding.call is not None for finding in report.findings)
    return f"{what}; calls are forward calls of the outermost module" if counted_by_call else what


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


def _verdict(report: Report) -> Section:
    """The facts of the most important finding beside its story, then the other findings."""
    if not report.findings:
        return Section("", (), anchor="verdict")
    meaning = proven_means(report)
    facts: tuple[Block, ...] = (
        Facts(tuple((fact.label, fact.line) for fact in ranked_facts(report))),
        *([Paragraph(meaning, Look.DIM)] if meaning else []),
    )
    advice = _advice_on(report, 0)
    others = report.findings[1:]
    folds = [
        _folded(finding, f"{at} of {len(report.findings)}", _advice_on(report, at - 1))
        for at, finding in enumerate(others[:_MOST_IN_FULL], 2)
    ]
    rest = others[_MOST_IN_FULL:]
    return Section(
        "",
        (*advice, *where_it_shows(report.excerpts), Beside(facts, _story(report.findings[0])), *folds, *_briefly(rest)),
        "verdict",
        "Verdict",
    )


def _advice_on(report: Report, position: int) -> tuple[Block, ...]:
    return do_this(report.do_this[position]) if position < len(report.do_this) else ()


def _folded(finding: Finding, position: str, advice: tuple[Block, ...]) -> Fold:
    facts = [("what", what(finding)), *((label, named(value)) for label, value in place(finding))]
    head = (f"Finding {position}: ", named(finding.id), f" {title(finding)}")
    return Fold(head, (*advice, Beside((Facts(tuple(facts)),), _story(finding))))


def _briefly(findings: Sequence[Finding]) -> Iterator[Fold]:
    rows = tuple((named(f.id), str(f.severity), named(f.module or f.fqn or ABSENT), f.summary) for f in findings)
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
        named(module_name(link.fqn or "") or "(no module)"),
        *source,
    )


def magnitude_section(report: Report) -> Section:
    """Lay out the strip, which needs no trace."""
    rows = report.strip
    near = "origin" if any(row.is_origin for row in rows) else "first inf or NaN"  # the origin only where one is known
    title = f"Activation magnitudes near the {near} (execution order, log scale)"
    if not rows:
        return Section(title, ())
    names = {row.fqn for row in rows}
    cells = tuple(_cells(row, names) for row in rows)
    table = Table(("", "module", "dtype", "absmax", "in its range", ""), cells)
    limits = {short_name(row.dtype): number(limit(row.dtype)) for row in rows if limit(row.dtype) is not None}
    ends = ", ".join(f"{dtype} {largest}" for dtype, largest in limits.items())
    scale = f"absmax: of the finite elements. Bars: log scale, from the dtype's smallest normal value to its max ({ends or ABSENT})."
    return Section(title, (table, Paragraph(scale, Look.DIM)), "strip", "Magnitudes")


def _cells(row: StripRow, names: set[str]) -> tuple[Line, ...]:
    look = Look.BAD if row.is_origin else Look.PLAIN
    note = _note(row)
    absmax = number(row.absmax)
    if row.absmax == 0 and (row.num_nan or row.num_inf):  # none is finite
        absmax = "NaN" if row.num_nan else "inf"
    filled = 1.0 if row.num_inf and row.absmax is not None else fill(row.absmax, row.dtype)
    return (
        Words("▶" if row.is_origin else "", look),
        _module_of(row, names),
        short_name(row.dtype),
        absmax,
        Bar(filled, bad=bool(note)),
        Words(note, look),
    )


def _note(row: StripRow) -> str:
    notes = ["ORIGIN"] if row.is_origin else []
    notes += [f"{count(row.num_inf)} inf"] if row.num_inf else []
    notes += [f"{count(row.num_nan)} NaN"] if row.num_nan else []
    return ", ".join(notes) or ("" if row.absmax is not None else ABSENT)


def _module_of(row: StripRow, names: set[str]) -> Line:
    """Name a module, with its class only where the name is a number or the failure originates there: that keeps the table narrow."""
    name = named(module_name(row.fqn, names) or row.cls or "(model)")
    tells_class = row.fqn and row.cls and (row.is_origin or row.fqn.replace(".", "").isdigit())
    return (name, Words(f" ({row.cls})", Look.DIM)) if tells_class else name


def _trust(report: Report) -> Section:
    """Observer certificate, expectation, and what was not covered."""
    replayed = [text for text in report.coverage if text.startswith(REPLAYED)]
    sentences = (observer_sentence(report.observer), *replayed, measured_sentence(report), raw_sentence(report))
    blocks: list[Block] = [Paragraph(sentence) for sentence in sentences if sentence]
    if report.expectation:
        blocks.append(Paragraph(expectation_line(report)))
    if gaps := tuple(text for text in report.coverage if text not in replayed):
        blocks += [Heading("not covered"), Items(gaps)]
    return Section("Can this be trusted?", tuple(blocks), "trust", "Trust")


def expectation_line(report: Report) -> Line:
    """Whether it came out as the scenario expects."""
    return (Words(_AS_EXPECTED[report.expectation_met], Look.STRONG), report.expectation)


def _reproduce(report: Report) -> Section:
    """The exact command, the call that was kept, the environment."""
    blocks: list[Block] = [Code(report.command, "sh")] if report.command else []
    blocks += _capsule(report)
    rows = environment_rows(report.environment)
    if rows:
        brief = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in rows)
        blocks.append(Fold("Environment", (environment_table(report.environment),), brief=brief))
    return Section("Reproduce", tuple(blocks), "reproduce")


def _capsule(report: Report) -> Iterator[Block]:
    """The failing call that was kept, and what makes it again; why there is none."""
    kept = report.capsule
    if not kept:
        return
    if "why" in kept:
        yield Paragraph(f"No call was kept as a capsule: {kept['why']}.")
        return
    where = indexed(kept["module"]) or "the whole model"
    yield Heading("capsule")
    yield Paragraph(
        f"{kept['directory']}/ holds the failing call of {where} ({kept['class']}), {memory(kept['bytes'])}: {kept['holds']}. It lies in the run directory (RUN) of who has run the program, and can be sent."
    )
    yield Code(replay_command(report), "sh")
    if kept.get("script"):
        yield Fold("Stand-alone script", (Code(kept["script"], "python"),), brief="")


def _checks(report: Report) -> Iterator[Check]:
    """What makes the command line exit with something else than 0.

    That is findings that no expectation announced, an expectation that did not come true, a worker that died. A remedy that was
    not tried, or tried without success, is skipped; so is a scenario that Ctrl-C has left out, of which nothing is known.
    """
    as_expected = report.expectation_met is True
    broken = report.status in (Status.WORKER_DIED, Status.ERROR, Status.UNKNOWN) and not as_expected
    before = report.before
    left_out = before is None and report.status is Status.UNKNOWN
    yield Check(
        name="run",
        outcome=Outcome.SKIPPED if left_out else Outcome.ERROR if broken else Outcome.PASSED,
        kind=report.status.value,
        message=report.headline,
        text=report.headline,
        seconds=seconds_of(before),
    )
    for finding in report.findings:
        harmless = finding.severity is Severity.INFO or as_expected
        yield Check(
            name=f"finding {finding.id}",
            outcome=Outcome.PASSED if harmless else Outcome.FAILED,
            kind=finding.id,
            message=finding.summary,
            text="\n".join(
                (
                    finding.summary,
                    f"{finding.severity}, {CONFIDENCE[finding.confidence]}",
                    *(f"{label}: {value}" for label, value in place(finding)),
                    f"cause: {finding.cause}",
                    *(f"- {item}" for item in finding.evidence),
                )
            ),
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


_VERDICT_HEADER = ("mode", "outcome", "phase", "module", "absmax")
_VERDICT_NOTE = (
    "module: where it fails, else where it comes closest to its dtype's max; absmax: the largest finite magnitude there. "
    "Compiled code is measured at what it returns: the model's output, or each layer's."
)

_Found = Mapping[str, Any]
_LOOKS = {"pass": Look.GOOD, "fail": Look.BAD, "unresolved": Look.WARN}
_MEASURABLE = 1 << 20
"""Bytes below which the peak of a process moves by itself."""


def bisection_part(report: Report) -> Section:
    """What was found; empty where there is no bisection, or nothing to bisect."""
    found = report.bisection
    if found is None or found.get("end") == "healthy":
        return Section("Bisection", ())
    blocks: list[Block] = [Facts(tuple((label, named(value)) for label, value in bisection_summary(found)))]
    if verdicts := bisection_verdicts(found):
        names = {module for _, _, _, module, _ in verdicts}
        rows: tuple[tuple[Line, ...], ...] = tuple(
            (mode, Words(outcome, _LOOKS.get(outcome, Look.PLAIN)), phase, module_name(module, names), absmax)
            for mode, outcome, phase, module, absmax in verdicts
        )
        blocks += [Heading("verdict of each mode"), Table(_VERDICT_HEADER, rows, _VERDICT_NOTE)]
    if remedy := remedy_yaml(found):
        blocks += [Heading("fix, to add to the scenario"), Code(remedy, "yaml")]
    return Section("Bisection", tuple(blocks), "bisection")


def bisection_summary(found: _Found) -> list[tuple[str, str]]:
    """What a bisection found, as labelled values."""
    offered = found.get("offered")
    minimal = "not checked" if found.get("end") not in (None, "found") else "no"
    rows = [
        ("culprits", ", ".join(indexed(str(name)) for name in found.get("culprits") or ()) or "none"),
        (
            "corrections",
            (", ".join(map(str, found.get("corrections") or ())) or "none")
            + (f" ({len(offered)} offered)" if offered else ""),
        ),
        ("minimal", "yes: without any one of them the failure recurs" if found.get("one_minimal") else minimal),
        ("probes", _probes(found)),
        *(("flaky", f"repeated runs differ: {line}") for line in found.get("flaky") or ()),
    ]
    if found.get("unresolved"):
        rows.append(("unresolved", f"{counted(int(found['unresolved']), 'probe')} failed differently"))
    if found.get("monotone") is False:
        rows.append(("not monotone", "a healthy run failed with more modules in float32"))
    if found.get("note"):
        rows.append(("note", str(found["note"])))
    if isinstance(cost := found.get("cost"), Mapping):
        rows.append(("cost in float32", _cost(cost)))
    if isinstance(script := found.get("reproduction"), Mapping):
        size = f"({memory(int(script.get('bytes') or 0))} of tensors)"
        made = f"{script['script']} {size}; verified, it prints: {script.get('said')}" if script.get("script") else ""
        rows.append(("reproduction", made or f"none: {script.get('reason')}"))
    return rows


def _probes(found: _Found) -> str:
    parts = [str(found.get("probes", ABSENT))]
    if found.get("candidates"):
        parts.append(f"for {counted(int(found['candidates']), 'candidate')}")
    if found.get("workload"):
        parts.append(f"by {found['workload']}")
    if isinstance(found.get("probe_seconds"), (int, float)):
        parts.append(f"(median {duration(float(found['probe_seconds']))})")
    return one_line(" ".join(parts), 300)


def _cost(cost: _Found) -> str:
    def more(size: int) -> str:
        return f"{'+' if size > 0 else ''}{memory(size)}"

    size, seconds = cost.get("memory_bytes"), cost.get("step_time")
    weights = more(cost.get("parameter_bytes") or 0)
    peak = ""
    if isinstance(size, int):
        peak = f", {more(size) if abs(size) >= _MEASURABLE else f'less than {memory(_MEASURABLE)}'} at the peak"
    step = f"; step time {ratio(cost['step_time_ratio'])}" if cost.get("step_time_ratio") else ""
    return f"{weights} of weights{peak}{step}" + (f" ({duration(seconds)})" if step and seconds else "")


def bisection_verdicts(found: _Found) -> list[tuple[str, str, str, str, str]]:
    """Mode, outcome, phase, module and absmax of each verdict."""

    def word(verdict: _Found, key: str) -> str:
        return one_line(str(verdict.get(key) or ABSENT))

    rows = []
    for verdict in found.get("verdicts") or ():
        mode, workload, step = word(verdict, "mode"), verdict.get("workload"), verdict.get("step")
        if workload not in (None, found.get("workload"), mode):  # it was decided by what the others did not run
            mode = one_line(f"{mode}: {workload}")
        phase = word(verdict, "phase") + (f", step {step}" if step is not None and verdict.get("phase") else "")
        module = "the model's output" if verdict.get("fqn") == "" else word(verdict, "fqn")
        absmax = verdict.get("absmax")
        shown = number(absmax) if isinstance(absmax, (int, float)) else ABSENT
        rows.append((mode, word(verdict, "outcome"), phase, module, shown))
    return rows


def remedy_yaml(found: _Found) -> str:
    """What to add to a scenario to fix it, as YAML; empty where no fix is known."""
    import yaml  # only a bisection is shown in YAML

    remedy = found.get("remedy")
    text: str = yaml.safe_dump(remedy, sort_keys=False, width=200) if isinstance(remedy, Mapping) else ""
    return text.rstrip("\n")
