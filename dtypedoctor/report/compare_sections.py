"""Two compared runs as a page of sections, which every format lays out in its own way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dtypedoctor.dtypes import short_name
from dtypedoctor.report.compare_words import difference_words, headline, place_words, reasons, when_words
from dtypedoctor.report.numbers import ABSENT, count, counted, number, series
from dtypedoctor.report.strip import shared_prefix
from dtypedoctor.trials.comparison import Divergence, Measured, Missing, ModuleDrift, Side, TraceComparison, Verdict

__all__ = ["Page", "Section", "page_of"]

_MOST_ROWS, _MOST_NAMES = 15, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        lines: sentences, shown as a list.
        header, rows: a table; the first cell of a row is a label, or, where they are ``named``, the name of something.
        notes: sentences below the table.
    """

    title: str
    lines: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A finished page; ``good`` where nothing is wrong."""

    headline: str
    good: bool
    sections: tuple[Section, ...]


def page_of(found: TraceComparison) -> Page:
    """The page about a comparison; sections that have nothing to say are left out."""
    sections = [make(found) for make in _SECTIONS]
    return Page(
        headline=headline(found),
        good=found.verdict is Verdict.EQUAL,
        sections=tuple(section for section in sections if section.lines or section.rows),
    )


def _runs(found: TraceComparison) -> Section:
    def row(label: str, cell: Callable[[Side], str]) -> tuple[str, ...]:
        return label, cell(found.a), cell(found.b)

    return Section(
        title="The two runs",
        header=("", "A", "B"),
        rows=(
            row("run", lambda side: side.label),
            row("ended", lambda side: side.ended),
            row("steps completed", lambda side: count(side.steps_completed)),
            row("device", lambda side: side.device or ABSENT),
            row("dtypes of outputs", lambda side: ", ".join(side.dtypes) or ABSENT),
            row("modules", lambda side: count(side.modules)),
            row("measurements", lambda side: count(side.tensors)),
        ),
        notes=(
            f"Tolerance {number(found.tolerance)} ({found.tolerance_reason}), for the relative error |a - b| / max(|a|, |b|).",
        ),
    )


def _why(found: TraceComparison) -> Section:
    return Section(title="Why they are not called equal", lines=tuple(reasons(found)))


def _first(found: TraceComparison) -> Section:
    return _divergence("First divergence, in execution order", found.first, found.compared)


def _first_nonfinite(found: TraceComparison) -> Section:
    other = found.first_nonfinite if found.first_nonfinite != found.first else None
    return _divergence("First NaN or inf that only one has", other, found.compared)


def _divergence(title: str, place: Divergence | None, compared: int) -> Section:
    if place is None:
        return Section(title=title)
    rows = [
        ("dtype", *(side.dtype if side else ABSENT for side in (place.a, place.b))),
        ("shape", *(str(list(side.shape)) if side else ABSENT for side in (place.a, place.b))),
        ("absmax", *(number(side.absmax) if side else ABSENT for side in (place.a, place.b))),
        ("inf, NaN", *(_counts(side) for side in (place.a, place.b))),
    ]
    lines = (
        f"{place_words(place)} ({place.cls}), {when_words(place)}: {difference_words(place)}.",
        f"It comes after {count(place.pairs_before)} of the {counted(compared, 'measurement')} that both runs have.",
    )
    return Section(title=title, lines=lines, header=("", "A", "B"), rows=tuple(rows))


def _counts(measured: Measured | None) -> str:
    return f"{count(measured.num_inf)}, {count(measured.num_nan)}" if measured else ABSENT


def _drift(found: TraceComparison) -> Section:
    modules = [module for module in found.modules if module.compared]
    beyond = sorted((module for module in modules if module.beyond), key=lambda module: module.first_beyond or 0)
    drifting = sorted((module for module in modules if module.max_error), key=lambda module: -module.max_error)
    rows = (beyond or drifting)[:_MOST_ROWS]
    shared = shared_prefix([module.fqn for module in rows if module.lane != "loss"])
    return Section(
        title="Drift per module, " + ("in the order in which they leave the tolerance" if beyond else "largest first"),
        header=("module", "in", "dtype", "beyond", "drift", "step"),
        rows=tuple(_drift_row(module, shared) for module in rows),
        notes=tuple(_drift_notes(modules, beyond, drifting)),
        named=True,
    )


def _drift_notes(
    modules: Sequence[ModuleDrift], beyond: Sequence[ModuleDrift], drifting: Sequence[ModuleDrift]
) -> Iterator[str]:
    yield f"{count(len(beyond))} of {counted(len(modules), 'row')} leave the tolerance; --format json has every one."
    if drifting:
        far = drifting[0]
        yield f"The largest drift is {number(far.max_error)}, of {_name(far, 0)} in step {far.max_error_step} ({far.lane})."


def _drift_row(module: ModuleDrift, shared: int) -> tuple[str, ...]:
    return (
        _name(module, shared),
        module.lane,
        _dtypes(module),
        f"{count(module.beyond)} of {count(module.compared)}",
        number(module.max_error),
        str(module.max_error_step or ABSENT),
    )


def _name(module: ModuleDrift, shared: int) -> str:
    if module.lane == "loss":
        return "(loss)"
    return ("…" if shared else "") + module.fqn[shared:] if module.fqn else module.cls or "(model)"


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
    return Section(
        title="Numbers per step",
        header=("", "run", "step by step"),
        rows=tuple(rows),
        notes=(f"The trained parameters at the end are {notes[found.parameters_equal]}.",) if rows else (),
    )


def _logprobs(found: TraceComparison) -> Section:
    rows = [
        (
            f"{probe.step}" + (" (untrained)" if probe.untrained else ""),
            count(probe.tokens),
            number(probe.error),
            number(probe.max_difference),
            count(probe.unmatched),
        )
        for probe in found.logprobs
    ]
    return Section(
        title="Token log-probabilities on the probe batch, after each step",
        header=("step", "tokens", "drift", "largest difference (nats)", "finite in one only"),
        rows=tuple(rows[:_MOST_ROWS]),
        notes=_rest(rows, "steps"),
    )


def _missing(found: TraceComparison) -> Section:
    groups: dict[tuple[str, bool, str, bool], list[Missing]] = {}
    for one in found.missing:
        groups.setdefault((one.only_in, one.whole, one.lane, one.after_the_end), []).append(one)
    return Section(
        title="Measured in one run only",
        lines=tuple(_missing_line(*key, several) for key, several in groups.items()),
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
    return Section(
        title="Dtypes that differ",
        header=("in", "A", "B", "modules", "the first"),
        rows=tuple(rows[:_MOST_ROWS]),
        notes=_rest(rows, "rows"),
    )


def _settings(found: TraceComparison) -> Section:
    named = [*(("", one) for one in found.settings), *(("environment: ", one) for one in found.environment)]
    rows = [(f"{prefix}{one.name}", one.a or ABSENT, one.b or ABSENT) for prefix, one in named]
    return Section(
        title="What the runs were given that differs",
        header=("", "A", "B"),
        rows=tuple(rows[: 2 * _MOST_ROWS]),
        notes=_rest(rows[_MOST_ROWS:], "rows"),
        named=True,
    )


def _rest(rows: Sequence[object], what: str) -> tuple[str, ...]:
    left = len(rows) - _MOST_ROWS
    return (f"{count(left)} more {what}; --format json has them.",) if left > 0 else ()


_SECTIONS: tuple[Callable[[TraceComparison], Section], ...] = (
    _runs,
    _why,
    _first,
    _first_nonfinite,
    _drift,
    _numbers,
    _logprobs,
    _missing,
    _dtype_changes,
    _settings,
)
"""In the order in which they stand on the page."""
