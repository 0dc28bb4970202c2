"""What loss, gradients, weights and outputs did before a failure, as measured: only what grew from step to step diverges."""

from dataclasses import dataclass

from dtypedoctor.trace.events import Op, Sample
from dtypedoctor.trace.model import Trace

GROWN = 10.0
"""Times the largest weight, or loss and gradients together, have to have grown."""
MOVED = 2.0
"""Times the largest weight has to have grown at least: what it has not made grow comes from elsewhere."""
GROWN_TOO_FAR = 1000.0
"""Times the loss, or what the model returns, has to have grown from call to call for a result that no float32 holds to be where that leads."""
FEWEST = 3
"""Calls before the failure that show whether something grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What was measured of a training before a step.

    Attributes:
        steps: training steps with a finite loss before it.
        losses: the first of these losses, and the last.
        gradients: largest gradient of the first of these steps, and of the last.
        weights: largest weight before the first optimizer step, and after the last one before the failure.
    """

    steps: int
    losses: tuple[float, float]
    gradients: tuple[float, float]
    weights: tuple[float, float]

    @property
    def diverges(self) -> bool:
        """Whether the loss has not come down while the weights have grown far beyond where they began, or have moved and loss and
        gradients have grown."""
        grown = all(last >= GROWN * first > 0.0 for first, last in (self.losses, self.gradients))
        weights = self.weights[1] / self.weights[0] if self.weights[0] else 0.0
        return self.losses[1] >= self.losses[0] and (weights >= GROWN or (grown and weights >= MOVED))


def growth_before(trace: Trace, step: int) -> Growth | None:
    """What loss, gradients and weights did in the training steps before ``step``; None where no optimizer has stepped."""
    largest = {kind: _largest_by_step(trace, kind, step) for kind in ("loss", "grad", "param", "initial")}
    losses, gradients, weights = (_ends(largest[kind]) for kind in ("loss", "grad", "param"))
    if losses is None or gradients is None or weights is None:
        return None
    before = min(largest["initial"].values(), default=weights[0])
    return Growth(
        steps=len(largest["loss"]),
        losses=losses,
        gradients=gradients,
        weights=(before, max(largest["param"].values())),
    )


def _largest_by_step(trace: Trace, kind: str, before: int) -> dict[int, float]:
    """The largest finite magnitude at places of one kind, by step."""
    largest: dict[int, float] = {}
    for sample, site in trace.measured():
        if site.kind == kind and sample.step < before and sample.finite:
            largest[sample.step] = max(largest.get(sample.step, 0.0), sample.absmax)
    return largest


def _ends(by_step: dict[int, float]) -> tuple[float, float] | None:
    return (by_step[min(by_step)], by_step[max(by_step)]) if by_step else None


def growth_over_calls(trace: Trace, op: Op) -> tuple[str, float, float] | None:
    """What grew from call to call before ``op``: the loss, else what the outermost module returned; its first magnitude and its last.

    None where fewer than :data:`FEWEST` finite ones were measured, or where the last is not :data:`GROWN_TOO_FAR` times the first.
    """
    for kind, name in (("loss", "loss"), ("output", "output of the model")):
        found = _before(trace, op, kind)
        if len(found) >= FEWEST and found[-1] >= GROWN_TOO_FAR * found[0] > 0.0:
            return name, found[0], found[-1]
    return None


def _before(trace: Trace, op: Op, kind: str) -> list[float]:
    """The finite magnitudes of the loss, or of what the one outermost module returned, in the calls before that of ``op``."""
    names = ("", "0") if kind == "loss" else ("",)
    measured = [
        (site.root, sample.absmax)
        for sample, site in trace.measured()
        if site.kind == kind and site.fqn in names and sample.finite and _is_before(sample, op)
    ]
    return [absmax for _, absmax in measured] if len({root for root, _ in measured}) == 1 else []


def _is_before(sample: Sample, op: Op) -> bool:
    """Whether a measurement is of an earlier call; of a program without modules, whether it was made earlier."""
    return sample.n < op.n and (not op.call or sample.call < op.call)


def largest_weight_before(trace: Trace, op: Op) -> float | None:
    """The largest magnitude that was measured in weights before ``op``; None where no optimizer has stepped."""
    held = (
        sample.absmax
        for sample, site in trace.measured()
        if site.kind in ("initial", "param") and sample.finite and sample.n < op.n
    )
    return max(held, default=None)
