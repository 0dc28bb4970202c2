"""What it costs to keep modules in float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.model import Forward, Scenario, Train
from dtypedoctor.scenario.request import Request
from dtypedoctor.trace.events import Metric, ParameterNote, Resources
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.bisection.laboratory import Laboratory
from dtypedoctor.trials.bisection.probes import Workload, with_kept

__all__ = ["Cost", "measure_cost"]

STEPS = 6
"""Of a workload whose steps are cheap; the first one, which warms up, does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Compared with the same run untreated; None where one of the two did not live long enough to say.

    Attributes:
        parameter_bytes: how much more the parameters and buffers take.
        memory_bytes: how much more the run took at its peak.
        step_time: median seconds of a step with the modules in float32.
        step_time_ratio: that over the untreated run's.
    """

    parameter_bytes: int
    memory_bytes: int | None
    step_time: float | None
    step_time_ratio: float | None


def measure_cost(lab: Laboratory, workload: Workload, modules: Sequence[str]) -> Cost | None:
    """Runs ``workload`` untreated and with ``modules`` in float32, one after the other; None where that is not possible."""
    scenario = _longer(workload.scenario)
    try:
        plain = lab.run(Request(scenario=scenario), "cost-untreated").trace
        kept = lab.run(Request(scenario=with_kept(scenario, modules)), "cost-kept").trace
    except UsageError:
        return None
    times = _step_time(plain), _step_time(kept)
    peaks = plain.last(Resources), kept.last(Resources)
    return Cost(
        parameter_bytes=_parameter_bytes(kept) - _parameter_bytes(plain),
        memory_bytes=peaks[1].peak_memory - peaks[0].peak_memory if peaks[0] and peaks[1] else None,
        step_time=times[1],
        step_time_ratio=times[1] / times[0] if times[0] and times[1] else None,
    )


def _longer(scenario: Scenario) -> Scenario:
    steps = scenario.model_dump()["steps"]
    if len(steps) == 1 and isinstance(scenario.steps[0].workload, (Forward, Train)):
        steps[0]["workload"]["steps"] = STEPS
    return scenario.with_changes(steps=steps)


def _step_time(trace: Trace) -> float | None:
    times = [m.values["step_time"] for m in trace.all(Metric) if "step_time" in m.values]
    return median(times[1:]) if len(times) > 1 else None


def _parameter_bytes(trace: Trace) -> int:
    """Bytes of all parameters and buffers as they were first noted."""
    notes: dict[tuple[int, str], ParameterNote] = {}
    for note in trace.all(ParameterNote):
        notes.setdefault((note.root, note.name), note)
    return sum(prod(note.shape) * DTYPES[note.dtype].bits // 8 for note in notes.values() if note.dtype in DTYPES)
