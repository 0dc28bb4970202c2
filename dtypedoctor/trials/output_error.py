"""How far a run's outputs are from those of its float32 twin."""

from math import fsum, sqrt

from dtypedoctor.trace.events import ProbeLogProbs
from dtypedoctor.trace.reader import Trace


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
