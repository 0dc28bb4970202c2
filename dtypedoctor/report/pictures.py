"""The map of a run: magnitudes, dtypes and why they change, and the op trace, from a trace; and as the data that the HTML page draws."""

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.diagnosis.rule import DTYPE_MISMATCH, Finding
from dtypedoctor.diagnosis.wording import module_of
from dtypedoctor.dtypes import DTYPES, short_name
from dtypedoctor.report.document import Map
from dtypedoctor.report.model import LANES, FlowLine, ModulePicture, OpLine, Picture, Series, TensorLine, UpdatesLine
from dtypedoctor.report.text import number, one_line
from dtypedoctor.trace.events import (
    Correction,
    Flow,
    Op,
    ParameterNote,
    Raised,
    Replay,
    Root,
    Sample,
    Site,
    TensorNote,
)
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import Updates


def why_it_changes(flow: Flow) -> str:
    """What makes ``flow``'s floating-point outputs differ in dtype from its inputs; empty where they do not differ.

    Torch's rules are asked in their order of precedence: autocast decides first, then type promotion among operands
    (https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc), then an explicit cast.
    """
    entering, leaving, weights = _floating(flow.inputs), _floating(flow.outputs), _floating(flow.weights)
    if not leaving or leaving <= entering:
        return ""
    if leaving == {flow.autocast}:
        return f"autocast runs it in {flow.autocast}"
    if not entering:  # an embedding; a container that is given token ids only hands on what is inside it
        return "it looks up values in the dtype of its weights" if leaving <= weights else ""
    promoted = _promoted(entering | weights)
    if leaving == {promoted} and promoted != _promoted(entering):
        return f"its {', '.join(sorted(weights))} weights promote the result to {promoted}"
    if leaving == {promoted}:
        return f"inputs of {' and '.join(sorted(entering))} are promoted to {promoted}"
    if leaving <= weights:
        return "it casts to the dtype of its weights"
    return "a cast inside it"


def _floating(dtypes: Iterable[str]) -> frozenset[str]:
    return frozenset(dtype for dtype in dtypes if dtype in DTYPES)


def _promoted(dtypes: frozenset[str]) -> str:
    widest = max(dtypes, key=lambda name: DTYPES[name].bits)
    same_width = {dtype for dtype in dtypes if DTYPES[dtype].bits == DTYPES[widest].bits}
    return widest if len(same_width) == 1 else "float32"  # float16 and bfloat16 meet in float32


MOST_OPS = 800
"""Ops of one picture; beyond, those nearest to the first that goes wrong are kept."""


def op_lines(trace: Trace) -> tuple[OpLine, ...]:
    """The traced ops in execution order."""
    ops = trace.all(Op)
    replays: dict[int, list[Replay]] = {}
    for replay in trace.all(Replay):
        replays.setdefault(replay.of, []).append(replay)
    wrong = next((i for i, op in enumerate(ops) if _born(op) or op.error), len(ops))
    start = max(0, min(wrong - MOST_OPS // 2, len(ops) - MOST_OPS))
    return tuple(_line(op, replays.get(op.n, ())) for op in ops[start : start + MOST_OPS])


def _line(op: Op, replays: Iterable[Replay]) -> OpLine:
    return OpLine(
        fqn=one_line(op.fqn),
        phase=op.phase,
        step=op.step,
        op=one_line(op.op, 80),
        inputs=tuple(map(_tensor, op.inputs)),
        outputs=tuple(map(_tensor, op.outputs)),
        source=one_line(op.source, 120) if op.source else None,
        notes=tuple(_notes(op, replays)),
        born=_born(op),
    )


def _born(op: Op) -> bool:
    if not op.inputs or any("inf" in scalar for scalar in op.scalars):
        return False  # a mask is filled with -inf on purpose
    return all(t.finite for t in op.inputs) and not all(t.finite for t in op.outputs)


def _notes(op: Op, replays: Iterable[Replay]) -> list[str]:
    notes = [f"raised: {one_line(op.error, 300)}"] if op.error else []
    if op.inplace or op.out_variant:
        notes.append("in place" if op.inplace else "out= variant")
    if op.function:
        notes.append(f"inside {one_line(op.function, 80)}")
    if op.autocast:
        notes.append(f"autocast {op.autocast}")
    for replay in replays:
        outcome = f"finite, absmax {number(replay.absmax)}" if replay.finite else "not finite either"
        notes.append(f"again in {replay.how}: {outcome}")
    return notes


def _tensor(note: TensorNote) -> str:
    shape = "×".join(map(str, note.shape)) or "scalar"
    parts = [short_name(note.dtype), shape]
    if note.absmax is not None:
        parts.append(f"absmax {number(note.absmax)}")
    inf = note.num_posinf + note.num_neginf
    parts += [f"{inf} inf"] if inf else []
    parts += [f"{note.num_nan} NaN"] if note.num_nan else []
    parts += [one_line(note.name, 100)] if note.name else []
    return " ".join(parts)


MOST_COLUMNS = 200
"""A longer run is shown with several steps to a column, each column at its worst."""

LANE_OF_PHASE = {
    "forward": "forward",
    "recompute": "forward",
    "compile": "forward",
    "generate": "generate",
    "backward": "backward",
}
"""The lane that a module's outputs of a phase stand in."""
_LANE_OF_PARAMETER = {"grad": "gradients", "param": "parameters"}
_WORDS = {"output": "output", "grad_output": "gradient of output", "grad": "gradient of", "param": "parameter"}

_Key = tuple[int, str]


def picture_of(trace: Trace, label: str, *, ops_from: Trace | None = None) -> Picture:
    """What a person looks at in ``trace``.

    Args:
        trace: the run.
        label: what the run is called, e.g. ``before``.
        ops_from: a second run of the same failure with the op trace on; by default the ops are those of ``trace``.
    """
    columns = _Columns(trace.samples)
    modules = _Modules()
    traced = ops_from if ops_from is not None else trace
    for root in trace.all(Root):
        modules.at((root.root, "")).cls = root.cls
    for flow in trace.all(Flow):
        modules.add_flow(flow)
    for op in traced.all(Op):
        modules.add_raising(op)
    peaks = _measure(trace, columns, modules)
    for site, peak in peaks.items():
        modules.add_tensor(trace.sites[site], peak)
    for note in trace.all(ParameterNote):
        modules.add_parameter(note)
    _add_updates(trace, columns, modules)
    return Picture(
        label=label,
        columns=columns.labels(),
        modules=tuple(module.freeze(key) for key, module in modules.found.items()),
        ops=op_lines(traced),
        notes=tuple(_events(trace)),
    )


@dataclass(slots=True)
class _Cells:
    """One row of the heat map while it is being filled."""

    absmax: "array[float]"
    nonfinite: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Peak:
    absmax: float = 0.0
    num_nan: int = 0
    num_inf: int = 0


@dataclass(slots=True)
class _Module:
    cls: str = ""
    series: dict[tuple[str, str], _Cells] = field(default_factory=dict)
    tensors: list[TensorLine] = field(default_factory=list)
    flows: list[FlowLine] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    updates: dict[str, UpdatesLine] = field(default_factory=dict)

    def freeze(self, key: _Key) -> ModulePicture:
        return ModulePicture(
            root=key[0],
            fqn=one_line(key[1]),
            cls=one_line(self.cls, 80),
            series=tuple(
                Series(lane=lane, dtype=dtype, absmax=cells.absmax, nonfinite=cells.nonfinite)
                for (lane, dtype), cells in self.series.items()
            ),
            tensors=tuple(self.tensors),
            flows=tuple(self.flows),
            weights=tuple(dict.fromkeys(self.weights.values())),
            updates=tuple(self.updates.values()),
        )


class _Columns:
    """Which column each step goes to."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        steps = {sample.step for sample in samples} or {1}
        self.first = min(steps)
        self._last = max(steps)
        self.width = math.ceil((self._last - self.first + 1) / MOST_COLUMNS)
        self.count = (self._last - self.first) // self.width + 1

    def labels(self) -> tuple[str, ...]:
        starts = range(self.first, self._last + 1, self.width)
        return tuple(str(s) if self.width == 1 else f"{s}–{min(s + self.width - 1, self._last)}" for s in starts)


class _Modules:
    """Modules by root and name, in the order in which they are first met."""

    def __init__(self) -> None:
        self.found: dict[_Key, _Module] = {}

    def at(self, key: _Key) -> _Module:
        return self.found.setdefault(key, _Module())

    def of_site(self, site: Site) -> tuple[_Module, str] | None:
        """The module that a site belongs to, and the lane; None for sites that no lane shows."""
        lane = _LANE_OF_PARAMETER.get(site.kind)
        if lane is not None:
            return self.at((site.root, site.fqn.rpartition(".")[0])), lane
        if site.kind not in ("output", "grad_output") or site.phase not in LANE_OF_PHASE:
            return None
        module = self.at((site.root, site.fqn))
        module.cls = module.cls or site.cls
        return module, LANE_OF_PHASE[site.phase]

    def add_flow(self, flow: Flow) -> None:
        module = self.at((flow.root, flow.fqn))
        module.cls = module.cls or flow.cls
        line = FlowLine(
            phase=flow.phase,
            step=flow.step,
            inputs=tuple(flow.inputs),
            weights=tuple(flow.weights),
            outputs=tuple(flow.outputs),
            autocast=flow.autocast,
            why=why_it_changes(flow),
        )
        module.flows.append(line)

    def add_raising(self, op: Op) -> None:
        """The dtypes that an operator raised on: its module has returned nothing, so nothing else tells them."""
        if not op.error or op.root < 0 or op.outputs:
            return
        dtypes = {of: tuple(t.dtype for t in op.inputs if (t.origin == "parameter") is of) for of in (False, True)}
        line = FlowLine(
            phase=op.phase,
            step=op.step,
            inputs=dtypes[False],
            weights=dtypes[True],
            outputs=(),
            autocast=op.autocast,
            why="",
            error=one_line(op.op, 80),
        )
        self.at((op.root, op.fqn)).flows.append(line)

    def add_parameter(self, note: ParameterNote) -> None:
        """The dtype of a weight, also of a module that was not called."""
        if note.buffer:
            return
        module = self.at((note.root, module_of(note.name)))
        module.cls = module.cls or note.owner
        module.weights[note.name] = one_line(str(note.quant["kind"]) if note.quant else note.dtype, 40)

    def add_tensor(self, site: Site, peak: _Peak) -> None:
        found = self.of_site(site)
        if found is None:
            return
        name = site.fqn.rpartition(".")[2] if site.kind in _LANE_OF_PARAMETER else site.index
        line = TensorLine(
            what=one_line(f"{_WORDS[site.kind]} {name}".strip(), 80),
            phase=site.phase,
            dtype=site.dtype,
            shape=tuple(site.shape),
            absmax=peak.absmax,
            num_nan=peak.num_nan,
            num_inf=peak.num_inf,
        )
        found[0].tensors.append(line)


def _measure(trace: Trace, columns: _Columns, modules: _Modules) -> dict[int, _Peak]:
    """Fills the heat map and returns the peak of every site that is part of it."""
    cells: dict[int, tuple[_Cells, _Peak]] = {}
    for key, site in trace.sites.items():
        place = modules.of_site(site)
        if place is not None:
            module, lane = place
            empty = array("d", [math.nan]) * columns.count
            cells[key] = (module.series.setdefault((lane, site.dtype), _Cells(empty)), _Peak())
    first, width = columns.first, columns.width
    for sample in trace.samples:  # hundreds of thousands: kept flat
        found = cells.get(sample.site)
        if found is None:
            continue
        row, peak = found
        column, absmax = (sample.step - first) // width, sample.absmax
        if not row.absmax[column] >= absmax:  # also true for the NaN of an empty cell
            row.absmax[column] = absmax
        peak.absmax = max(peak.absmax, absmax)
        if sample.num_nan or sample.num_inf:
            nan, inf = row.nonfinite.get(column, (0, 0))
            row.nonfinite[column] = (nan + sample.num_nan, inf + sample.num_inf)
            peak.num_nan += sample.num_nan
            peak.num_inf += sample.num_inf
    return {key: peak for key, (_, peak) in cells.items()}


def _add_updates(trace: Trace, columns: _Columns, modules: _Modules) -> None:
    """The share of each parameter's updates that is lost, which a record gives over all steps up to its own.

    What an optimizer's last record leaves out has lost less than half in the end, and is left out.
    """
    last = {seen.what.optimizer: seen.what.parameters for seen in trace.observed(Updates)}
    roots = {note.name: note.root for note in trace.all(ParameterNote)}
    for seen in trace.observed(Updates):
        column = (seen.step - columns.first) // columns.width
        shown = last[seen.what.optimizer].keys() & roots.keys() if 0 <= column < columns.count else ()
        for name, one in seen.what.parameters.items():
            if name not in shown:
                continue
            module = modules.at((roots[name], module_of(name)))
            line = UpdatesLine(
                name=one_line(name.rpartition(".")[2], 80),
                dtype=one.dtype,
                lost=one.lost,
                wanted=one.wanted,
                update=one.update,
                absmax=one.absmax,
            )
            module.updates[name] = line
            cells = module.series.setdefault(("updates", one.dtype), _Cells(array("d", [math.nan]) * columns.count))
            if not cells.absmax[column] >= line.percent:  # also true for the NaN of an empty cell
                cells.absmax[column] = line.percent


def _events(trace: Trace) -> Iterator[str]:
    for raised in trace.all(Raised):
        place = f"{trace.moment(raised.step)}, {raised.phase}" + (
            f", in {raised.modules[-1]}" if raised.modules else ""
        )
        yield f"{raised.type} in {place}: {one_line(raised.message, 400)}"
    for correction in {record.id: record for record in trace.all(Correction)}.values():
        state = correction.proof if correction.installed else f"not installed: {correction.reason}"
        counts = f"{correction.hits} hits, {correction.rescued} rescued, {correction.clamped} clamped"
        yield f"correction {correction.id}: {one_line(state, 300)}; {counts}"


_LANE_TITLES = ("Forward", "Generate", "Backward", "Parameter gradients", "Parameters", "Lost updates")
_DTYPES = ("dtypes", "Dtypes")
"""The view without steps: the dtypes of each module."""


def map_data(shown: Map | None) -> str:
    """The runs of a map as JSON that may stand inside a ``script`` element: no character in it can end that element or begin another.

    Keys are short because they occur once per module; the script names them where it reads them.
    """
    facts = {
        "lanes": [*([name, title] for name, title in zip(LANES, _LANE_TITLES, strict=True)), list(_DTYPES)],
        "dtypes": {d.name: {"short": d.short, "max": d.max, "tiny": d.tiny} for d in DTYPES.values()},
        "findings": [
            {
                "id": f.id,
                "fqn": f.fqn,
                "op": f.op,
                "lane": _lane_of(f),
                "step": f.step,
                "source": f.source,
                "summary": f.summary,
            }
            for f in (shown.findings if shown is not None else ())
        ],
    }
    runs = ",".join(_picture_json(picture) for picture in (shown.pictures if shown is not None else ()))
    return _embeddable(f'{{"runs":[{runs}],{_dump(facts)[1:]}')


def _lane_of(finding: Finding) -> str:
    """What shows a finding best: the dtypes where they disagree, lost updates, else the magnitudes of its phase."""
    if finding.id == "update-stall":
        return "updates"
    return _DTYPES[0] if spec_of(finding.id).family == DTYPE_MISMATCH else LANE_OF_PHASE.get(finding.phase or "", "")


def _embeddable(text: str) -> str:
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _picture_json(picture: Picture) -> str:
    modules = ",".join(_module_json(module) for module in picture.modules)
    rest = {
        "label": picture.label,
        "columns": picture.columns,
        "notes": picture.notes,
        "ops": [_op_json(op) for op in picture.ops],
    }
    return f'{{"modules":[{modules}],{_dump(rest)[1:]}'


def _module_json(module: ModulePicture) -> str:
    series = ",".join(_series_json(series) for series in module.series)
    rest = {
        "r": module.root,
        "f": module.fqn,
        "c": module.cls,
        "t": [_tensor_json(tensor) for tensor in module.tensors],
        "w": [_flow_json(flow) for flow in module.flows],
        "p": module.weights,
        "u": [_updates_json(line) for line in module.updates],
    }
    return f'{{"s":[{series}],{_dump(rest)[1:]}'


def _series_json(series: Series) -> str:
    # Formatting by hand, to four digits, is five times faster than json and half as long. -1 stands for "not measured".
    numbers = ",".join(["-1" if math.isnan(value) else f"{value:.4g}" for value in series.absmax])
    bad = _dump({str(column): counts for column, counts in series.nonfinite.items()})
    return f"[{LANES.index(series.lane)},{_dump(series.dtype)},[{numbers}],{bad}]"


def _tensor_json(tensor: TensorLine) -> list[Any]:
    return [
        tensor.what,
        tensor.phase,
        tensor.dtype,
        tensor.shape,
        _rounded(tensor.absmax),
        tensor.num_nan,
        tensor.num_inf,
    ]


def _flow_json(flow: FlowLine) -> list[Any]:
    return [flow.phase, flow.step, flow.inputs, flow.weights, flow.outputs, flow.autocast, flow.why, flow.error]


def _updates_json(line: UpdatesLine) -> list[Any]:
    return [line.name, line.dtype, line.lost, line.wanted, line.percent, _rounded(line.update), _rounded(line.absmax)]


def _op_json(op: OpLine) -> list[Any]:
    return [op.fqn, op.phase, op.step, op.op, op.inputs, op.outputs, op.source, op.notes, int(op.born)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


def _dump(value: dict[str, Any] | Sequence[Any] | str) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
