"""What a run did, boiled down to the numbers of the before/after table."""

from collections.abc import Sequence
from statistics import median

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.runner.launch import Run
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trace.events import Metric, Raised, Resources, Root
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.output_error import output_error
from dtypedoctor.trials.results import RunSummary

INTERRUPTED = "interrupted"
"""How the end of a run begins, in words, that somebody stopped with Ctrl-C."""


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
        ended=how_it_ended(run),
        finding_ids=tuple(dict.fromkeys(f.id for f in diagnose(trace))),
        output_error=output_error(trace, twin, _models(scenario)) if twin is not None else None,
    )


def _exception(raised: Raised, moment: str) -> str:
    """An exception in words; ``moment`` is the step or call, and empty where that says nothing."""
    name = INTERRUPTED if raised.type == "KeyboardInterrupt" else raised.type
    place = f" in {moment} ({raised.phase})" if moment else ""
    first_line = raised.message.splitlines()[0] if raised.message else ""
    return f"{name}{place}" + (f": {first_line[:160]}" if first_line else "")


def _series(name: str, metrics: Sequence[Metric]) -> tuple[float | None, ...]:
    """The values of one quantity, None where it was not finite; empty where the run does not have it at all."""
    known = any(name in metric.values or name in metric.nonfinite for metric in metrics)
    return tuple(metric.values.get(name) for metric in metrics) if known else ()


def uncaught(trace: Trace) -> Raised | None:
    """What ended the run; not an exception that the program caught."""
    return next((record for record in reversed(trace.all(Raised)) if not record.caught), None)


def how_it_ended(run: Run) -> str:
    """The end of a run in words: ``completed``, the exception, or how the process died."""
    if run.died:
        return run.last_words()
    raised = uncaught(run.trace)
    if raised is not None:
        told = not run.foreign or bool(run.trace.all(Root))
        return _exception(raised, run.trace.moment(raised.step) if told else "")
    if run.foreign and run.exit.code != 0:
        return run.exit.describe()
    return "completed"
