"""Distils a picture from a trace."""

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dtypedoctor.report.dtype_flow import why_it_changes
from dtypedoctor.report.ops import op_lines
from dtypedoctor.report.picture import FlowLine, ModulePicture, Picture, Series, TensorLine
from dtypedoctor.report.text import one_line
from dtypedoctor.trace.events import Correction, Flow, Raised, Root, Sample, Site
from dtypedoctor.trace.reader import Trace

__all__ = ["MOST_COLUMNS", "distil"]

MOST_COLUMNS = 200
"""A longer run is shown with several steps to a column, each column at its worst."""

_LANE_OF_PHASE = {
    "forward": "forward",
    "recompute": "forward",
    "compile": "forward",
    "generate": "generate",
    "backward": "backward",
}
_LANE_OF_PARAMETER = {"grad": "gradients", "param": "parameters"}
_WORDS = {"output": "output", "grad_output": "gradient of output", "grad": "gradient of", "param": "parameter"}

_Key = tuple[int, str]


def distil(trace: Trace, label: str, *, ops_from: Trace | None = None) -> Picture:
    """What a person looks at in ``trace``.

    Args:
        trace: the run.
        label: what the run is called, e.g. ``before``.
        ops_from: a second run of the same failure with the op trace on; by default the ops are those of ``trace``.
    """
    columns = _Columns(trace.samples)
    modules = _Modules()
    for root in trace.all(Root):
        modules.at((root.root, "")).cls = root.cls
    for flow in trace.all(Flow):
        modules.add_flow(flow)
    peaks = _measure(trace, columns, modules)
    for number, peak in peaks.items():
        modules.add_tensor(trace.sites[number], peak)
    return Picture(
        label=label,
        columns=columns.labels(),
        modules=tuple(module.freeze(key) for key, module in modules.found.items()),
        ops=op_lines(ops_from if ops_from is not None else trace),
        notes=tuple(_notes(trace)),
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
        if site.kind not in ("output", "grad_output") or site.phase not in _LANE_OF_PHASE:
            return None
        module = self.at((site.root, site.fqn))
        module.cls = module.cls or site.cls
        return module, _LANE_OF_PHASE[site.phase]

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
    for number, site in trace.sites.items():
        place = modules.of_site(site)
        if place is not None:
            module, lane = place
            empty = array("d", [math.nan]) * columns.count
            cells[number] = (module.series.setdefault((lane, site.dtype), _Cells(empty)), _Peak())
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
    return {number: peak for number, (_, peak) in cells.items()}


def _notes(trace: Trace) -> Iterator[str]:
    for raised in trace.all(Raised):
        place = f"{trace.moment(raised.step)}, {raised.phase}" + (
            f", in {raised.modules[-1]}" if raised.modules else ""
        )
        yield f"{raised.type} in {place}: {one_line(raised.message, 400)}"
    for correction in {record.id: record for record in trace.all(Correction)}.values():
        state = correction.proof if correction.installed else f"not installed: {correction.reason}"
        counts = f"{correction.hits} hits, {correction.rescued} rescued, {correction.clamped} clamped"
        yield f"correction {correction.id}: {one_line(state, 300)}; {counts}"
