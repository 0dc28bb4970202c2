"""What a run did, boiled down to the numbers of the before/after table."""

from collections.abc import Sequence
from statistics import median

from dtypedoctor.analysis import analysis_of, ending_of
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trace.events import Metric, Resources
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.output_error import output_error
from dtypedoctor.trials.results import RunSummary


def planned_steps(scenario: Scenario) -> int:
    """Steps that the scenario's workloads are to do."""
    return sum(getattr(step.workload, "steps", 0) for step in scenario.steps)


def _models(scenario: Scenario) -> int:
    return sum(step.model is not None for step in scenario.steps)


def summarise(label: str, run: Run, scenario: Scenario, twin: Trace | None = None) -> RunSummary:
    """The row of ``run`` in the before/after table; ``twin`` is the trace of its float32 twin, where there is one."""
    trace = run.trace
    metrics = trace.all(Metric)
    resources = trace.last(Resources)
    times = [m.values["step_time"] for m in metrics if "step_time" in m.values]
    return RunSummary(
        label=label,
        steps_completed=trace.steps_done,
        steps_planned=planned_steps(scenario),
        loss=_series("loss", metrics),
        grad_norm=_series("grad_norm", metrics),
        reward=_series("reward", metrics),
        step_time=median(times[1:] or times) if times else None,
        peak_memory=resources.peak_memory if resources else None,
        ended=ending_of(run).words,
        finding_ids=tuple(dict.fromkeys(f.id for f in analysis_of(trace).findings)),
        output_error=output_error(trace, twin, _models(scenario)) if twin is not None else None,
    )


def _series(name: str, metrics: Sequence[Metric]) -> tuple[float | None, ...]:
    """The values of one quantity, None where it was not finite; empty where the run does not have it at all."""
    known = any(name in metric.values or name in metric.nonfinite for metric in metrics)
    return tuple(metric.values.get(name) for metric in metrics) if known else ()
