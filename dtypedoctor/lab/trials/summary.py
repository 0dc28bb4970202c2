"""Compares runs of a scenario in numbers: with float32, with the reference, and with an uninstrumented run (the observer certificate)."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import exp, expm1, fsum, sqrt
from statistics import median

from dtypedoctor.analysis import analysis_of
from dtypedoctor.examination.examine import COMPARED, summarise
from dtypedoctor.examination.results import Observer, Parity, RunSummary
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.redaction.messages import without_volatile
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Metric, ProbeLogProbs, Resources
from dtypedoctor.trace.model import Trace


def summarise_against(label: str, run: Run, scenario: Scenario, twin: Trace | None) -> RunSummary:
    """The row of ``run`` in the before/after table; ``twin`` is the trace of its float32 twin, where there is one."""
    steps = sum(getattr(step.workload, "steps", 0) for step in scenario.steps)
    models = sum(step.model is not None for step in scenario.steps)
    error = output_error(run.trace, twin, models) if twin is not None else None
    return replace(summarise(label, run, steps), output_error=error)


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


_SET = re.compile(r"\{([^{}:]*)\}")
"""How Python prints a set, in an order of its own in each process."""


def compare_unwatched(watched: Run, unwatched: Run) -> Observer:
    """Compares losses, gradient norms and the trained parameters of a watched run and an unwatched one, bit for bit.

    Of several ranks each is compared with itself, and the worst of them counts.
    """
    if len(watched.ranks) == len(unwatched.ranks) > 1:
        each = [_compare(one, other) for one, other in zip(watched.ranks, unwatched.ranks, strict=True)]
        rank = min(range(len(each)), key=lambda number: _WORST_FIRST.index(each[number].bitwise_equal))
        everywhere = f"on each of {len(each)} ranks" if each[rank].bitwise_equal else f"on rank {rank}"
        return replace(each[rank], reason=f"{everywhere}, {each[rank].reason}")
    return _compare(watched, unwatched)


_WORST_FIRST = (False, None, True)


def _compare(watched: Run, unwatched: Run) -> Observer:
    if watched.died or unwatched.died:
        return Observer(bitwise_equal=None, reason="a worker died, so there is nothing to compare")
    end, end_unwatched = watched.trace.end, unwatched.trace.end
    if end is None or end_unwatched is None:
        return Observer(bitwise_equal=None, reason="a trace has no end")
    if end.outcome != end_unwatched.outcome:
        ours, theirs = _ending(watched, end.outcome), _ending(unwatched, end_unwatched.outcome)
        return Observer(bitwise_equal=False, reason=f"the run {ours} with instrumentation, and {theirs} without")
    if watched.trace.folded is not None or unwatched.trace.folded is not None:
        return _by_parameters(watched, unwatched)
    difference = _difference(watched, unwatched)
    if difference:
        return Observer(bitwise_equal=False, reason=difference)
    steps = len(watched.trace.all(Metric))
    if not steps:
        reason = f"{_nothing_to_compare(end.outcome)}{'; the script ended in the same way' if watched.foreign else ''}"
        return Observer(bitwise_equal=None, reason=reason, same_error=end.outcome == "raised")
    trained = "the gradients and parameters after each of them" if watched.foreign else "the trained parameters"
    return Observer(
        bitwise_equal=True,
        reason=f"{_compared(watched)} of {steps} step(s) and {trained} are bitwise equal with and without instrumentation",
        same_error=end.outcome == "raised",
    )


def _nothing_to_compare(outcome: str) -> str:
    if outcome == "raised":
        return "the run raises the same error with and without instrumentation, before any step has numbers to compare"
    return "no step was completed, so there is nothing to compare"


def _by_parameters(watched: Run, unwatched: Run) -> Observer:
    """Long runs, of which not every step is kept: the trained parameters tell."""
    ours, theirs = watched.trace.last(Resources), unwatched.trace.last(Resources)
    if ours is None or theirs is None or ours.checksum is None or theirs.checksum is None:
        return Observer(bitwise_equal=None, reason="steps of so long a run are not all kept for comparison")
    equal = ours.checksum == theirs.checksum
    verdict = "are bitwise equal with and without instrumentation" if equal else "differ"
    return Observer(bitwise_equal=equal, reason=f"the trained parameters {verdict}")


def _compared(run: Run) -> str:
    """What was there to compare, e.g. ``loss, grad_norm``."""
    metrics = run.trace.all(Metric)
    names = [name for name in COMPARED if any(name in m.values or name in m.nonfinite for m in metrics)]
    return ", ".join(names) or "the number"


def _process_of(run: Run) -> int:
    """The number of its process; 0 where it is not known."""
    return run.trace.header.pid if run.trace.header is not None else 0


def _ending(run: Run, outcome: str) -> str:
    raised = analysis_of(run.trace).uncaught
    if outcome == "raised" and raised is not None:
        return f"raises {raised.type} ({(raised.message.splitlines() or [''])[0][:160]})"
    return {"completed": "completes", "raised": "raises"}.get(outcome, outcome)


def _text(run: Run) -> str:
    """What ended the run, without what differs from process to process; empty where nothing was raised."""
    raised = analysis_of(run.trace).uncaught
    if raised is None:
        return ""
    said = raised.message.split("from user code:", 1)[0]  # Dynamo quotes torch's own lines there, which hooks change
    return f"{raised.type}: {_SET.sub(_sorted, without_volatile(said, _process_of(run)))}"


def _sorted(printed: re.Match[str]) -> str:
    return ", ".join(sorted(printed[1].split(", ")))


def _difference(watched: Run, unwatched: Run) -> str:
    """In what the two runs differ first; empty where they do not."""
    metrics = _metric_difference(watched.trace.all(Metric), unwatched.trace.all(Metric))
    if metrics:
        return metrics
    ours, theirs = (_text(run) for run in (watched, unwatched))
    if ours and theirs and ours != theirs:
        return "the exceptions differ"
    status = _status_difference(watched, unwatched)
    if status:
        return status
    mine, yours = watched.trace.last(Resources), unwatched.trace.last(Resources)
    if mine is not None and yours is not None and mine.checksum != yours.checksum:
        return "the trained parameters differ"
    return ""


def _status_difference(watched: Run, unwatched: Run) -> str:
    """The statuses, where they differ. Which rank torchrun ends before it has ended by itself is a race, and no difference."""
    if watched.exit.ended_by_launcher or unwatched.exit.ended_by_launcher or watched.exit.code == unwatched.exit.code:
        return ""
    return f"the script {watched.exit.describe()} with instrumentation, and {unwatched.exit.describe()} without"


def _metric_difference(ours: Sequence[Metric], theirs: Sequence[Metric]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} steps with instrumentation, {len(theirs)} without"
    for one, other in zip(ours, theirs, strict=True):
        for name in COMPARED:
            mine, yours = one.values.get(name), other.values.get(name)
            if mine != yours:
                return f"{name} of step {one.step} is {mine} with instrumentation, {yours} without"
    return ""
