"""The precision that each part of a model was asked to have beside what it had: stored, computed, gathered, reduced, as gradient, and kept by the optimizer."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.report.document import Line, Look, Paragraph, Section, Table, Words, named
from dtypedoctor.text import ABSENT, counted
from dtypedoctor.trace.events import Flow, Observed, ParameterNote
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import AutocastRegion, CollectiveCall, ModelConfig, ParameterEnds, ShardUnit

_MOST_ROWS = 24
_REDUCTIONS = frozenset({"reduce_scatter", "all_reduce", "reduce"})
_HAD = ("stored", "computed", "gathered", "reduced", "gradient", "optimizer")
_MEANING = (
    "Computed: what the modules that hold the parameters return. Gathered and reduced: what collectives carry, those of inner modules in a backward pass too. "
    "Optimizer: what it keeps for each element. What is not as a policy or the model asks for is marked."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """Parameters of one part of a model that have the same precision everywhere. Each value names dtypes, joined by commas, and is empty where none was seen.

    Attributes:
        part: dotted name of the shard unit; empty for the whole model.
        example: the first of these parameters.
        parameters: how many they are.
        asked: what a policy, a model, its configuration or an autocast region asks for, in words.
        stored: of the parameters.
        computed: what the modules that hold them return.
        gathered, reduced: what collectives of the part carry; reduced in backward passes, there also what belongs to no part.
        gradient: as an optimizer step finds it.
        optimizer: of what the optimizer keeps for each element.
        broken: which of these values are not as a policy or the model asks.
    """

    part: str
    example: str = ""
    parameters: int = 0
    asked: str
    stored: str
    computed: str
    gathered: str
    reduced: str
    gradient: str
    optimizer: str
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Seen:
    """What a trace says of modules and parameters by outermost module and name, and of collectives by shard unit."""

    computed: dict[tuple[int, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    gathered: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    reduced: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    gradients: dict[tuple[int, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    states: dict[str, str] = field(default_factory=dict)


_NOTHING = PrecisionRow(part="", asked="", stored="", computed="", gathered="", reduced="", gradient="", optimizer="")


def precisions_in(trace: Trace) -> tuple[PrecisionRow, ...]:
    """The rows of a run; empty where all is float32 and nothing else was asked for."""
    units = {unit.fqn or "": unit.what for unit in trace.observed(ShardUnit)}
    seen = _seen_in(trace, units)
    numbers: Counter[PrecisionRow] = Counter()
    examples: dict[PrecisionRow, str] = {}
    for note in {(note.root, note.name): note for note in trace.all(ParameterNote) if not note.buffer}.values():
        row = _row(note, seen, units, list(_asked(note, units, trace)))
        numbers[row] += 1
        examples.setdefault(row, note.name)
    if all(map(_is_plain, numbers)):
        return ()
    return tuple(replace(row, parameters=number, example=examples[row]) for row, number in numbers.items())


def _is_plain(row: PrecisionRow) -> bool:
    return not row.asked and {getattr(row, name) for name in _HAD} <= {"", "float32"}


def _seen_in(trace: Trace, units: Mapping[str, ShardUnit]) -> _Seen:
    seen = _Seen()
    _note_collectives(trace, units, seen)
    for flow in trace.all(Flow):
        if flow.phase != "backward":
            seen.computed[flow.root, flow.fqn].update(filter(None, flow.outputs))
    for site in trace.sites.values():
        if site.kind == "grad":
            seen.gradients[site.root, site.fqn].add(site.dtype)
    for ends in trace.observed(ParameterEnds):
        seen.states.update(zip(ends.what.names, ends.what.states, strict=False))
    return seen


def _note_collectives(trace: Trace, units: Mapping[str, ShardUnit], seen: _Seen) -> None:
    for call in trace.observed(CollectiveCall):
        unit, collective = _unit_of(call.fqn or "", units), call.what
        carries = {collective.dtype} & DTYPES.keys()
        if collective.name == "all_gather":
            seen.gathered[unit] |= carries
        elif collective.name in _REDUCTIONS and call.phase == "backward":
            seen.reduced[unit] |= carries


def _unit_of(name: str, units: Mapping[str, ShardUnit]) -> str:
    """The innermost shard unit around a module or parameter; empty for the whole model."""
    return max((unit for unit in units if not unit or f"{name}.".startswith(f"{unit}.")), key=len, default="")


Asked = tuple[str, str, str]
"""A dtype, by whom it is asked for, and which value of a row shows it; empty where others beside it are as they should be."""


def _asked(note: ParameterNote, units: Mapping[str, ShardUnit], trace: Trace) -> Iterator[Asked]:
    yield from _asked_by_policy(units.get(_unit_of(note.name, units)))
    if any(_keeps(config, note.name) for config in trace.observed(ModelConfig)):
        yield "float32", "kept by the model", "stored"
    for dtype in sorted({region.what.wanted for region in trace.observed(AutocastRegion) if region.what.enabled}):
        yield dtype, "by autocast", ""


def _asked_by_policy(policy: ShardUnit | None) -> Iterator[Asked]:
    if policy is not None and policy.param_dtype:
        yield policy.param_dtype, "to compute", "gathered"
        yield policy.reduce_dtype or policy.param_dtype, "to reduce", "reduced"


def _keeps(config: Observed[ModelConfig], name: str) -> bool:
    """Whether a model's lists of modules to keep in float32 name one around a parameter."""
    is_inside = not config.fqn or name.startswith(f"{config.fqn}.")
    return is_inside and not set(config.what.keep_in_fp32).isdisjoint(name.split("."))


def _row(note: ParameterNote, seen: _Seen, units: Mapping[str, ShardUnit], asked: Sequence[Asked]) -> PrecisionRow:
    unit = _unit_of(note.name, units)
    gradients = seen.gradients[note.root, note.name]
    had: dict[str, Any] = {
        "stored": str(note.quant.get("kind")) if note.quant else note.dtype,
        "computed": _joined(seen.computed[note.root, note.name.rpartition(".")[0]]),
        "gathered": _joined(seen.gathered[unit]),
        "reduced": _joined(seen.reduced[unit] | seen.reduced[""]),
        "gradient": _joined(gradients),
        "optimizer": seen.states.get(note.name, "") if gradients else "",
    }
    broken = dict.fromkeys(value for dtype, _, value in asked if value and had[value] not in ("", dtype))
    words = ", ".join(dict.fromkeys(f"{dtype} {whose}" for dtype, whose, _ in asked))
    return replace(_NOTHING, part=unit, asked=words, broken=tuple(broken), **had)


def _joined(dtypes: set[str]) -> str:
    return ", ".join(sorted(dtypes))


def precisions_section(rows: Sequence[PrecisionRow]) -> Section:
    """Lay out the table; empty where there is nothing to tell."""
    title = "Precision: asked for, and had"
    if not rows:
        return Section(title, ())
    columns = [name for name in _HAD if any(getattr(row, name) for row in rows)]
    cells = tuple((_parameters(row), row.asked or ABSENT, *_values(row, columns)) for row in rows[:_MOST_ROWS])
    rest = (Paragraph(f"{len(rows) - _MOST_ROWS} more rows are in report.json."),) if len(rows) > _MOST_ROWS else ()
    table = Table(("parameters", "asked", *columns), cells)
    return Section(title, (table, *rest, Paragraph(_MEANING, Look.DIM)), "precisions", "Precision")


def _parameters(row: PrecisionRow) -> Line:
    others = f" and {counted(row.parameters - 1, 'other')}" if row.parameters > 1 else ""
    return (named(row.example), others)


def _values(row: PrecisionRow, columns: Sequence[str]) -> Iterator[Line]:
    for name in columns:
        value = getattr(row, name) or ABSENT
        yield Words(f"{value} (!)", Look.BAD) if name in row.broken else value
