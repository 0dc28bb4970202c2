"""How far two runs' policies are apart on the same inputs."""

from math import exp, expm1
from statistics import median

from dtypedoctor.trace.events import Metric, ProbeLogProbs
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.results import Parity

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
