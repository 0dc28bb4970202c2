"""The document about two compared runs: the verdict in a sentence, where they diverge, and why they are not equal."""

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from statistics import mean

from dtypedoctor.diagnosis.wording import module_name, percent
from dtypedoctor.dtypes import short_name
from dtypedoctor.lab.compare.comparison import (
    Difference,
    Divergence,
    Measured,
    Missing,
    ModuleDrift,
    ParameterDrift,
    Side,
    TraceComparison,
    Verdict,
    relative_error,
)
from dtypedoctor.report.document import (
    Block,
    Check,
    Document,
    Items,
    Line,
    Look,
    Outcome,
    Paragraph,
    Section,
    Table,
    named,
)
from dtypedoctor.report.to_json import plain
from dtypedoctor.text import ABSENT, count, counted, number, series

SCHEMA = 1
"""Version of the JSON form; it changes by addition only."""

_MOST_ROWS, _MOST_NAMES, _MOST_STEPS = 15, 4, 5


def comparison_document(found: TraceComparison) -> Document:
    """The document about a comparison; sections that have nothing to say are left out."""
    said = headline(found)
    status, _, sentence = said.partition(": ")
    good = found.verdict is Verdict.EQUAL
    return Document(
        name=f"{found.a.label} and {found.b.label}",
        headline=sentence,
        status=status,
        good=good,
        about="Two runs, compared by dtypedoctor.",
        sections=tuple(section for section in _sections(found) if section.blocks),
        checks=(Check(name="comparison", outcome=Outcome.PASSED if good else Outcome.FAILED, message=said, text=said),),
        data=lambda: {
            "schema": SCHEMA,
            "kind": "comparison",
            "headline": said,
            **plain(found),
            "tolerance_grows": found.tolerance_ceiling > found.tolerance,
        },
    )


def _section(
    title: str,
    lines: Sequence[str] = (),
    header: tuple[str, ...] = (),
    rows: Sequence[tuple[Line, ...]] = (),
    notes: Sequence[str] = (),
) -> Section:
    """Sentences, a table, and notes below it; empty without sentences and rows."""
    blocks: list[Block] = [Items(tuple(lines))] if lines else []
    if rows:
        blocks.append(Table(header, tuple(rows)))
    if blocks:
        blocks += [Paragraph(note, Look.DIM) for note in notes]
    short = title.partition(",")[0].removesuffix(" in one run only")
    return Section(title, tuple(blocks), anchor=title.partition(",")[0].lower().replace(" ", "-"), short=short)


_OF_A_RUN: dict[str, Callable[[Side], str]] = {
    "run": lambda side: side.label,
    "ended": lambda side: side.ended,
    "steps completed": lambda side: count(side.steps_completed),
    "device": lambda side: side.device or ABSENT,
    "dtypes of outputs": lambda side: ", ".join(side.dtypes) or ABSENT,
    "modules": lambda side: count(side.modules),
    "measurements": lambda side: count(side.tensors),
}


def _sections(found: TraceComparison) -> Iterator[Section]:
    """The sections in the order in which they stand on the page."""
    accepted = f"Tolerance {number(found.tolerance)} ({found.tolerance_reason}), for the relative error |a - b| / max(|a|, |b|)."
    runs = tuple((label, cell(found.a), cell(found.b)) for label, cell in _OF_A_RUN.items())
    yield _section("The two runs", header=("", "A", "B"), rows=runs, notes=(accepted,))
    yield _section("Why they are not equal", lines=tuple(reasons(found)))
    findings = [(name, id, summary) for name, side in (("A", found.a), ("B", found.b)) for id, summary in side.findings]
    yield _section("Findings", header=("run", "finding", "summary"), rows=findings)
    yield _divergence("First divergence, in execution order", found.first, found.compared)
    other = found.first_nonfinite if found.first_nonfinite != found.first else None
    yield _divergence("First NaN or inf in one run only", other, found.compared)
    yield _drift(found)
    yield _numbers(found)
    groups: dict[tuple[str, bool, str, bool], list[Missing]] = {}
    for one in found.missing:
        groups.setdefault((one.only_in, one.whole, one.lane, one.after_the_end), []).append(one)
    yield _section(
        "Measured in one run only",
        lines=tuple(_missing_line(*key, several) for key, several in groups.items()),
    )
    yield _dtype_changes(found)
    several = [*(("", one) for one in found.settings), *(("environment: ", one) for one in found.environment)]
    settings = [(named(f"{prefix}{one.name}"), one.a or ABSENT, one.b or ABSENT) for prefix, one in several]
    shown, more = settings[: 2 * _MOST_ROWS], _rest(settings[_MOST_ROWS:], "rows")
    yield _section("Settings that differ", header=("", "A", "B"), rows=shown, notes=more)


def _divergence(title: str, place: Divergence | None, compared: int) -> Section:
    if place is None:
        return _section(title)
    rows = [
        ("dtype", *(side.dtype if side else ABSENT for side in (place.a, place.b))),
        ("shape", *(str(list(side.shape)) if side else ABSENT for side in (place.a, place.b))),
        ("absmax", *(number(side.absmax) if side else ABSENT for side in (place.a, place.b))),
        (
            "inf, NaN",
            *((f"{count(side.num_inf)}, {count(side.num_nan)}" if side else ABSENT) for side in (place.a, place.b)),
        ),
    ]
    lines = (
        f"{_place(place)}{f' ({place.cls})' * bool(place.cls)}, {_when(place)}: {_difference(place)}.",
        f"It comes after {count(place.pairs_before)} of the {counted(compared, 'measurement')} that both runs have.",
    )
    return _section(title, lines=lines, header=("", "A", "B"), rows=tuple(rows))


def _drift(found: TraceComparison) -> Section:
    modules = [module for module in found.modules if module.compared]
    beyond = sorted(filter(attrgetter("beyond"), modules), key=lambda module: module.first_beyond or 0)
    drifting = sorted(filter(attrgetter("max_error"), modules), key=attrgetter("max_error"), reverse=True)
    rows = (beyond or drifting)[:_MOST_ROWS]
    names = {module.fqn for module in modules}
    notes = [
        f"{count(len(beyond))} of {counted(len(modules), 'row')} exceed the tolerance; --format json has every one."
    ]
    if drifting:
        far = drifting[0]
        where = f"{_name(far, names)} in step {far.max_error_step} ({far.lane})"
        notes.append(f"The largest drift is {number(far.max_error)}, of {where}.")
    return _section(
        "Drift per module, " + ("in the order in which they exceed the tolerance" if beyond else "largest first"),
        header=("module", "in", "dtype", "beyond", "drift", "step"),
        rows=tuple(_drift_row(module, names) for module in rows),
        notes=notes,
    )


def _drift_row(module: ModuleDrift, names: Collection[str]) -> tuple[Line, ...]:
    return (
        named(_name(module, names)),
        module.lane,
        _dtypes(module),
        f"{count(module.beyond)} of {count(module.compared)}",
        number(module.max_error),
        str(module.max_error_step or ABSENT),
    )


def _name(module: ModuleDrift, names: Collection[str]) -> str:
    if module.lane == "loss":
        return "(loss)"
    return module_name(module.fqn, names) or module.cls or "(model)"


def _dtypes(module: ModuleDrift) -> str:
    a, b = ("+".join(map(short_name, names)) for names in (module.dtypes_a, module.dtypes_b))
    return a if a == b else f"{a} → {b}"


def _numbers(found: TraceComparison) -> Section:
    rows = []
    for metric in found.metrics:
        rows.append((metric.name, "A", series(metric.a)))
        rows.append(("", "B", series(metric.b)))
        rows.append(("", "drift", number(metric.max_error) if len(metric.steps) > len(metric.lone) else ABSENT))
    notes = {True: "bitwise equal", False: "not bitwise equal", None: "not known to be equal"}
    return _section(
        "Numbers per step",
        header=("", "run", "step by step"),
        rows=tuple(rows),
        notes=(f"The trained parameters at the end are {notes[found.parameters_equal]}.",) if rows else (),
    )


def _missing_line(only_in: str, whole: bool, lane: str, after: bool, several: Sequence[Missing]) -> str:
    names = [(one.fqn or "(model)") + (f" (output {one.path})" if one.path else "") for one in several]
    shown = ", ".join(names[:_MOST_NAMES]) + (
        f", and {count(len(names) - _MOST_NAMES)} more" if len(names) > _MOST_NAMES else ""
    )
    modules = counted(len(several), "module or parameter", "modules or parameters")
    what = modules if whole else f"{counted(len(several), 'tensor')} ({lane})"
    end = ", all after the last measurement that both runs have" if after else ""
    return f"only in {only_in}: {what}{end}: {shown}"


def _dtype_changes(found: TraceComparison) -> Section:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for module in found.modules:
        if module.compared and module.dtypes_a != module.dtypes_b:
            key = module.lane, "+".join(module.dtypes_a), "+".join(module.dtypes_b)
            groups.setdefault(key, []).append(module.fqn or "(model)")
    rows = [(lane, a, b, count(len(names)), names[0]) for (lane, a, b), names in groups.items()]
    return _section(
        "Dtypes that differ",
        header=("in", "A", "B", "modules", "the first"),
        rows=tuple(rows[:_MOST_ROWS]),
        notes=_rest(rows, "rows"),
    )


def _rest(rows: Sequence[object], what: str) -> tuple[str, ...]:
    left = len(rows) - _MOST_ROWS
    return (f"{count(left)} more {what}; --format json has them.",) if left > 0 else ()


def headline(found: TraceComparison) -> str:
    """The outcome in one or two sentences, the verdict first."""
    why = reasons(found)
    if found.verdict is Verdict.EQUAL:
        said = f"{counted(found.compared, 'measurement')} in both runs {_agreement(found)}"
        extras = sum(one.tensors for one in found.missing)
        ignored = f" Ignored: {counted(extras, 'measurement')} of outputs that only one run's modules return."
        return f"EQUAL: {said}.{ignored if extras else ''}{_findings_of_one(found)}"
    if found.verdict is Verdict.INCOMPLETE:
        shared = found.compared + sum(len(metric.steps) - len(metric.lone) for metric in found.metrics)
        return f"INCOMPLETE: what both have agrees, but {why[0]}" if shared else f"NOTHING COMPARED: {why[0]}"
    if found.first is None:
        return f"DIVERGED: {why[0]}"
    first, other = found.first, found.first_nonfinite
    if other is None or other == first:
        return f"DIVERGED: {_place(first)} is the first to differ, in {_when(first)}: {_difference(first)}."
    return (  # a NaN or inf that only one has matters more than the drift that comes before it
        f"DIVERGED: {_place(other)}, in {_when(other)}: {_difference(other)}. Before that, finite values "
        f"differ first in {_place(first)}, in {_when(first)}: {_difference(first)}."
    )


def reasons(found: TraceComparison) -> list[str]:
    """Everything for which the two are not equal, divergences first; empty for equal runs."""
    return [*_divergences(found), *_gaps(found)]


def _place(place: Divergence) -> str:
    """The tensor that differs."""
    what = {
        "backward": "the gradient of the output of {}",
        "gradient": "the gradient of {}",
        "parameter": "the parameter {}",
        "loss": "the loss",
    }
    named = (module_name(place.fqn) or place.cls or "the model") + (f" (output {place.path})" if place.path else "")
    return what.get(place.lane, "{}").format(named)


def _when(place: Divergence) -> str:
    """The step, the part of it, and which call."""
    nth = f", call {place.nth} of the step" if place.nth > 1 else ""
    return f"step {place.step} ({place.lane}{nth})"


def _difference(place: Divergence) -> str:
    """In what the two differ there."""
    a, b = place.a, place.b
    if a is None or b is None:
        return f"only {'A' if b is None else 'B'} makes this call"
    if place.difference is Difference.SHAPE:
        return f"its shape is {list(a.shape)} in A and {list(b.shape)} in B"
    if place.difference is Difference.NONFINITE:
        return f"A {_finiteness(a)}, B {_finiteness(b)}"
    error = f" (relative error {number(place.error)})" if place.error is not None else ""
    return f"absmax is {number(a.absmax)} in A and {number(b.absmax)} in B{error}"


def _finiteness(measured: Measured) -> str:
    parts = [
        f"{count(amount)} {name}" for amount, name in ((measured.num_inf, "inf"), (measured.num_nan, "NaN")) if amount
    ]
    return f"holds {' and '.join(parts)}" if parts else "is finite"


def _agreement(found: TraceComparison) -> str:
    if found.equal == found.compared:
        return "are equal to the precision of the trace"
    return f"agree within {number(found.tolerance)} ({count(found.equal)} equal to the precision of the trace)"


def _findings_of_one(found: TraceComparison) -> str:
    """What the runs are diagnosed with, where that is not the same."""
    a, b = ({name for name, _ in side.findings} for side in (found.a, found.b))
    alone = [(side, sorted(names)) for side, names in (("A", a - b), ("B", b - a)) if names]
    return "".join(
        f" Only {side} has the {'finding' if len(names) == 1 else 'findings'} {', '.join(names)}."
        for side, names in alone
    )


def _divergences(found: TraceComparison) -> Iterator[str]:
    if found.ends_differ:
        yield f"the runs ended differently: A: {found.a.ended}; B: {found.b.ended}"
    if found.beyond:
        yield (
            f"{count(found.beyond)} of {counted(found.compared, 'measurement')} in both disagree: "
            f"by more than {number(found.tolerance)}, in shape, or in NaN or inf"
        )
    first = found.first
    if first is not None and first.difference in (Difference.ONLY_A, Difference.ONLY_B):
        yield f"{_place(first)} is called once more in one run than in the other, in {_when(first)}"
    yield from _different_ends(found)
    # metrics and log-probabilities that differ, with the steps in which they do
    for metric in found.metrics:
        if metric.beyond:
            yield f"{metric.name} differs in {_steps(metric.beyond)}"
    apart = [probe.step for probe in found.logprobs if probe.error > found.tolerance_at(probe.step) or probe.unmatched]
    if apart:
        yield f"the log-probabilities on the probe batch differ after {_steps(tuple(apart))}"
    if found.tolerance == 0 and found.parameters_equal is False:
        yield "the trained parameters are not bitwise equal"


def _different_ends(found: TraceComparison) -> Iterator[str]:
    """Parameters that training takes elsewhere, or that it moves in one run only."""
    by_side: dict[str, list[ParameterDrift]] = {"A": [], "B": [], "": []}
    for parameter in found.parameters:
        by_side[parameter.stands_still].append(parameter)
    for side in ("A", "B"):
        if still := by_side[side]:
            moved_a = percent(mean(parameter.a.moved for parameter in still))
            moved_b = percent(mean(parameter.b.moved for parameter in still))
            yield (
                f"training does not move {counted(len(still), 'parameter')} in {side}: after {counted(still[0].steps, 'step')} {moved_a} of "
                f"the elements in A and {moved_b} in B are not what they were before the first"
            )
    apart = [parameter for parameter in by_side[""] if parameter.beyond]
    if apart:
        worst = max(apart, key=lambda one: relative_error(one.a.distance, one.b.distance))
        yield (
            f"training takes {counted(len(apart), 'parameter')} to another distance from the start, {module_name(worst.fqn)} to "
            f"{number(worst.a.distance)} in A and {number(worst.b.distance)} in B"
        )


def _steps(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:_MOST_STEPS]))
    more = f" and {count(len(steps) - _MOST_STEPS)} more" if len(steps) > _MOST_STEPS else ""
    return f"step{'s' if len(steps) > 1 else ''} {shown}{more}"


def _gaps(found: TraceComparison) -> Iterator[str]:
    for name, side in (("A", found.a), ("B", found.b)):
        # What was not recorded of one run
        if not side.watched:
            yield f"{name} was not instrumented, so none of its tensors was measured"
        elif not side.tensors:
            yield f"no tensor was measured in {name}"
        if not side.complete:
            yield f"the trace of {name} is cut short: it has no end record"
        yield from (f"the trace of {name} is damaged: {damage}" for damage in side.damage)
    for name in ("A", "B"):
        yield from _only_in(name, [one for one in found.missing if one.only_in == name])
    yield from _surplus(found)


def _only_in(name: str, missing: Sequence[Missing]) -> Iterator[str]:
    """What was measured in one run only: whole modules, and tensors of modules that both have."""
    modules = sum(one.whole for one in missing)
    parts = sum(not one.whole and not one.extra for one in missing)
    if modules:
        yield f"{counted(modules, 'module or parameter', 'modules or parameters')} measured in {name} only"
    if parts:
        yield f"{counted(parts, 'tensor')} of modules that both have measured in {name} only"


def _surplus(found: TraceComparison) -> Iterator[str]:
    """Calls and steps that one run has more of, though the other knows the module."""
    for name in ("A", "B"):
        calls = found.surplus(name)
        if calls:
            yield f"{counted(calls, 'measurement')} of {name} without a counterpart: the other run made fewer calls or steps"
    steps = sorted({step for metric in found.metrics for step in metric.lone})
    if steps:
        yield f"only one run reports its numbers for {_steps(tuple(steps))}"
