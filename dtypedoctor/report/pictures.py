"""The map of a run, from a trace: magnitudes, dtypes and why they change, and the op trace, as the data that the HTML page draws.

Keys are short because they occur once per module: ``modules.js`` names them where it reads them.
"""

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.diagnosis.rule import DTYPE_MISMATCH, Finding
from dtypedoctor.diagnosis.wording import module_of
from dtypedoctor.dtypes import DTYPES, short_name
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.results import run_of_fix
from dtypedoctor.foreign_files import inside
from dtypedoctor.report.document import Map
from dtypedoctor.report.model import Outcome, Picture, Report
from dtypedoctor.text import number, one_line
from dtypedoctor.trace.events import (
    Correction,
    Flow,
    Op,
    ParameterNote,
    Raised,
    Replay,
    Root,
    Site,
    TensorNote,
)
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.ranks import BEFORE, leading_directory
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.records.silent import StalledParameter, Updates


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


def _op_lines(trace: Trace) -> tuple[list[Any], ...]:
    """List the traced ops in execution order: module, phase, step, op, operands, results, source, notes, and whether it made what is not finite."""
    ops = trace.all(Op)
    replays: dict[int, list[Replay]] = {}
    for replay in trace.all(Replay):
        replays.setdefault(replay.of, []).append(replay)
    wrong = next((i for i, op in enumerate(ops) if _born(op) or op.error), len(ops))
    start = max(0, min(wrong - MOST_OPS // 2, len(ops) - MOST_OPS))
    return tuple(
        [
            one_line(op.fqn),
            op.phase,
            op.step,
            one_line(op.op, 80),
            list(map(_tensor, op.inputs)),
            list(map(_tensor, op.outputs)),
            one_line(op.source, 120) if op.source else None,
            _notes(op, replays.get(op.n, ())),
            int(_born(op)),
        ]
        for op in ops[start : start + MOST_OPS]
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

LANES = {
    "forward": "Forward",
    "generate": "Generate",
    "backward": "Backward",
    "gradients": "Parameter gradients",
    "parameters": "Parameters",
    "updates": "Lost updates",
}
"""The lanes of the heat map with their titles: outputs in the forward pass (recomputation included), outputs while generating, gradients of
outputs, gradients of parameters, parameters after the optimizer step, updates that rounding loses. The last three belong to the module that holds the parameter."""
_LANE_OF_PHASE = {
    "forward": "forward",
    "recompute": "forward",
    "compile": "forward",
    "generate": "generate",
    "backward": "backward",
}
"""The lane that a module's outputs of a phase stand in."""
_LANE_OF_PARAMETER = {"grad": "gradients", "param": "parameters"}
_WORDS = {"output": "output", "grad_output": "gradient of output", "grad": "gradient of", "param": "parameter"}
_DTYPES = "dtypes"
"""The view without steps: the dtypes of each module."""


def picture_of(trace: Trace, label: str) -> Picture:
    """Distill what a person looks at in ``trace``.

    Args:
        trace: the run.
        label: what the run is called, e.g. ``before``.
    """
    modules = _Modules(trace)
    for root in trace.all(Root):
        modules.at(root.root, "").cls = root.cls
    for flow in trace.all(Flow):
        modules.at(flow.root, flow.fqn, flow.cls).flows.append(
            _flow(flow, flow.inputs, flow.weights, flow.outputs, why_it_changes(flow))
        )
    for op in trace.all(Op):
        if (
            op.error and op.root >= 0 and not op.outputs
        ):  # its module has returned nothing, so nothing else tells its dtypes
            given, weights = ([t.dtype for t in op.inputs if (t.origin == "parameter") is of] for of in (False, True))
            modules.at(op.root, op.fqn).flows.append(_flow(op, given, weights, [], "", one_line(op.op, 80)))
    modules.measure()
    for note in trace.all(ParameterNote):  # also of modules that were not called
        if not note.buffer:
            module = modules.at(note.root, module_of(note.name), note.owner)
            module.weights[note.name] = one_line(str(note.quant["kind"]) if note.quant else note.dtype, 40)
    modules.add_updates()
    return Picture(
        label=label,
        columns=modules.columns,
        modules=tuple(module.data(*key) for key, module in modules.known.items()),
        ops=_op_lines(trace),
        notes=tuple(_events(trace)),
    )


def _flow(
    seen: Flow | Op, given: list[str], weights: list[str], results: list[str], why: str, error: str = ""
) -> list[Any]:
    """Say which dtypes enter and leave a module in one phase, and what changes them or which operator raised on them."""
    return [seen.phase, seen.step, given, weights, results, seen.autocast, why, error]


@dataclass(slots=True)
class _Cells:
    """One row of the heat map while it is being filled: the largest absmax of each column, and how many elements are NaN and inf."""

    absmax: "array[float]"
    nonfinite: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Peak:
    absmax: float = 0.0
    num_nan: int = 0
    num_inf: int = 0


@dataclass(slots=True)
class _Module:
    cls: str = ""
    series: dict[tuple[str, str], _Cells] = field(default_factory=dict)
    tensors: list[list[Any]] = field(default_factory=list)
    flows: list[list[Any]] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    updates: dict[str, list[Any]] = field(default_factory=dict)

    def data(self, root: int, fqn: str) -> dict[str, Any]:
        """Give the module as the page reads it; -1 stands for what was not measured."""
        lanes = list(LANES)
        return {
            "s": [
                [
                    lanes.index(lane),
                    dtype,
                    [-1 if math.isnan(v) else _rounded(v) for v in cells.absmax],
                    cells.nonfinite,
                ]
                for (lane, dtype), cells in self.series.items()
            ],
            "r": root,
            "f": one_line(fqn),
            "c": one_line(self.cls, 80),
            "t": self.tensors,
            "w": self.flows,
            "p": list(dict.fromkeys(self.weights.values())),
            "u": list(self.updates.values()),
        }


class _Modules:
    """The modules of a trace by root and name, in the order in which they are first met, and the columns of its steps."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.known: dict[tuple[int, str], _Module] = {}
        steps = {sample.step for sample in trace.samples} or {1}
        self._first, last = min(steps), max(steps)
        self._width = width = math.ceil((last - self._first + 1) / MOST_COLUMNS)
        starts = range(self._first, last + 1, width)
        self.columns = tuple(str(s) if width == 1 else f"{s}–{min(s + width - 1, last)}" for s in starts)

    def at(self, root: int, fqn: str, cls: str = "") -> _Module:
        """Look up a module, which is made where it is new."""
        module = self.known.setdefault((root, fqn), _Module())
        module.cls = module.cls or cls
        return module

    def _of_site(self, site: Site) -> tuple[_Module, str] | None:
        """Find the module that a site belongs to, and the lane; None for sites that no lane shows."""
        lane = _LANE_OF_PARAMETER.get(site.kind)
        if lane is not None:
            return self.at(site.root, site.fqn.rpartition(".")[0]), lane
        if site.kind not in ("output", "grad_output") or site.phase not in _LANE_OF_PHASE:
            return None
        return self.at(site.root, site.fqn, site.cls), _LANE_OF_PHASE[site.phase]

    def _cells(self, module: _Module, lane: str, dtype: str) -> _Cells:
        return module.series.setdefault((lane, dtype), _Cells(array("d", [math.nan]) * len(self.columns)))

    def measure(self) -> None:
        """Fill the heat map, and list the tensors of each module with their largest values."""
        places = {key: place for key, site in self._trace.sites.items() if (place := self._of_site(site)) is not None}
        cells = {
            key: (self._cells(module, lane, self._trace.sites[key].dtype), _Peak())
            for key, (module, lane) in places.items()
        }
        first, width = self._first, self._width
        for sample in self._trace.samples:  # hundreds of thousands: kept flat
            known = cells.get(sample.site)
            if known is None:
                continue
            row, peak = known
            column, absmax = (sample.step - first) // width, sample.absmax
            if not row.absmax[column] >= absmax:  # also true for the NaN of an empty cell
                row.absmax[column] = absmax
            peak.absmax = max(peak.absmax, absmax)
            if sample.num_nan or sample.num_inf:
                nan, inf = row.nonfinite.get(column, (0, 0))
                row.nonfinite[column] = [nan + sample.num_nan, inf + sample.num_inf]
                peak.num_nan += sample.num_nan
                peak.num_inf += sample.num_inf
        for key, (module, _) in places.items():
            site, peak = self._trace.sites[key], cells[key][1]
            name = site.fqn.rpartition(".")[2] if site.kind in _LANE_OF_PARAMETER else site.index
            what = one_line(f"{_WORDS[site.kind]} {name}".strip(), 80)
            module.tensors.append(
                [what, site.phase, site.dtype, list(site.shape), _rounded(peak.absmax), peak.num_nan, peak.num_inf]
            )

    def add_updates(self) -> None:
        """Add the share of each parameter's updates that is lost, which a record gives over all steps up to its own.

        What an optimizer's last record leaves out has lost less than half in the end, and is left out.
        """
        last = {seen.what.optimizer: seen.what.parameters for seen in self._trace.observed(Updates)}
        roots = {note.name: note.root for note in self._trace.all(ParameterNote)}
        for seen in self._trace.observed(Updates):
            column = (seen.step - self._first) // self._width
            shown = last[seen.what.optimizer].keys() & roots.keys() if 0 <= column < len(self.columns) else ()
            for name, one in seen.what.parameters.items():
                if name not in shown:
                    continue
                module = self.at(roots[name], module_of(name))
                short, percent = one_line(name.rpartition(".")[2], 80), _percent_lost(one)
                module.updates[name] = [
                    short,
                    one.dtype,
                    one.lost,
                    one.wanted,
                    percent,
                    _rounded(one.update),
                    _rounded(one.absmax),
                ]
                cells = self._cells(module, "updates", one.dtype)
                if not cells.absmax[column] >= percent:  # also true for the NaN of an empty cell
                    cells.absmax[column] = percent


def _percent_lost(one: StalledParameter) -> float:
    """Give the share that is lost, rounded down, so that 100 means all."""
    return math.floor(1000 * one.lost / one.wanted) / 10 if one.wanted else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


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


def map_data(shown: Map | None) -> str:
    """Write the runs of a map as JSON that may stand inside a ``script`` element: no character in it can end that element or begin another."""
    pictures, findings = (shown.pictures, shown.findings) if shown is not None else ((), ())
    data = {
        "runs": [
            {"modules": p.modules, "label": p.label, "columns": p.columns, "notes": p.notes, "ops": p.ops}
            for p in pictures
        ],
        "lanes": [*([name, title] for name, title in LANES.items()), [_DTYPES, "Dtypes"]],
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
            for f in findings
        ],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _lane_of(finding: Finding) -> str:
    """Choose what shows a finding best: the dtypes where they disagree, lost updates, else the magnitudes of its phase."""
    if finding.id == "update-stall":
        return "updates"
    return _DTYPES if spec_of(finding.id).family == DTYPE_MISMATCH else _LANE_OF_PHASE.get(finding.phase or "", "")


REFERENCE = "reference"


def with_pictures(report: Report, directory: Path) -> Report:
    """``report`` with a picture of the baseline, of the first fix that works, and of the reference.

    Args:
        report: the report of the run in ``directory``.
        directory: holds one trace directory per run: ``before``, ``remedy-ID`` and ``reference``. A run that left no trace is passed over.
    """
    cures = [trial.remedy for trial in report.trials if trial.outcome is Outcome.FIXED]
    wanted = {BEFORE: "baseline", **{run_of_fix(remedy): remedy for remedy in cures[:1]}, REFERENCE: REFERENCE}
    pictures = []
    for name, label in wanted.items():
        with suppress(UsageError, OSError):  # a run that was not tried, or whose trace was deleted to save space
            pictures.append(picture_of(read_trace(leading_directory(inside(directory, name))), label))
    return replace(report, pictures=tuple(pictures))
