"""What a run did in numbers: its row in the before/after table, its error against float32, its distance from the reference."""

from collections.abc import Sequence
from math import exp, expm1, fsum, sqrt
from statistics import median

from dtypedoctor.analysis import analysis_of, ending_of
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trace.events import Metric, ProbeLogProbs, Resources
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.results import Parity, RunSummary


def output_error(run: Trace, twin: Trace, models: int) -> float | None:
    """The largest relative error over the models of a run, each taken before its first training step.

    For one model it is the root mean square of the differences between the two runs' token log-probabilities on the probe
    batch, over the standard deviation of the twin's: 0 for equal outputs, about 1 for outputs that have nothing to do with
    each other.

    Args:
        run: the run to judge.
        twin: that of the float32 twin.
        models: number of models that the run was to build; if the twin has more, the run was to build its last ones.

    Returns:
        None where a model gave no finite outputs before its first step.
    """
    ours, theirs = _first_outputs(run), _first_outputs(twin)
    if not models or len(ours) != models or len(theirs) < models:
        return None
    errors = [_relative(mine, exact) for mine, exact in zip(ours, theirs[-models:], strict=True)]
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(errors) else None


def _first_outputs(trace: Trace) -> list[list[float | None]]:
    return [record.values for record in trace.all(ProbeLogProbs) if record.untrained]


def _relative(values: list[float | None], exact: list[float | None]) -> float | None:
    pairs = [(a, b) for a, b in zip(values, exact, strict=False) if a is not None and b is not None]
    if len(pairs) < max(len(values), len(exact)) or not pairs:
        return None
    mean = fsum(b for _, b in pairs) / len(pairs)
    spread = sqrt(fsum((b - mean) ** 2 for _, b in pairs))
    difference = sqrt(fsum((a - b) ** 2 for a, b in pairs))
    return difference / spread if spread else None


REWARD_TOLERANCE = 0.01
"""Mean rewards closer than this count as equal."""


def parity(run: Trace, reference: Trace) -> Parity | None:
    """Compares the probe batch's token log-probabilities step by step; None where no step can be compared."""
    ours = {p.step: p.values for p in run.all(ProbeLogProbs) if not p.untrained}
    theirs = {p.step: p.values for p in reference.all(ProbeLogProbs) if not p.untrained}
    shared = sorted(ours.keys() & theirs.keys())
    per_step = [kl for step in shared if (kl := _mean_kl(ours[step], theirs[step])) is not None]
    if not per_step:
        return None
    return Parity(
        median_kl=median(per_step),
        p95_kl=_percentile(per_step, 0.95),
        max_kl=max(per_step),
        total_kl=sum(per_step),
        steps_compared=len(per_step),
        reward_equal_steps=_equal_rewards(run, reference),
    )


def _mean_kl(ours: list[float | None], theirs: list[float | None]) -> float | None:
    """Mean of exp(d) - d - 1 over the tokens; expm1 keeps small differences, which exp would round away."""
    gaps = [t - o for o, t in zip(ours, theirs, strict=False) if o is not None and t is not None]
    if not gaps or len(gaps) < len(ours):
        return None
    return sum(expm1(d) - d if d < 700 else exp(700) for d in gaps) / len(gaps)


def _percentile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _equal_rewards(run: Trace, reference: Trace) -> int | None:
    ours = {m.step: m.values["reward"] for m in run.all(Metric) if "reward" in m.values}
    theirs = {m.step: m.values["reward"] for m in reference.all(Metric) if "reward" in m.values}
    if not ours or not theirs:
        return None
    return sum(abs(ours[s] - theirs[s]) < REWARD_TOLERANCE for s in ours.keys() & theirs.keys())


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
