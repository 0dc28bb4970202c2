"""``divergence``: a training whose weights, gradients and loss have grown without bound, in whatever dtype it ends."""

from collections.abc import Iterator
from dataclasses import dataclass

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.statement import Statement, make_finding
from dtypedoctor.diagnosis.wording import how_the_run_ended
from dtypedoctor.trace.model import Trace

__all__ = ["ENDS", "Growth", "growth_before", "judge_divergence"]

ENDS = frozenset(
    {"float16-overflow", "attention-score-overflow", "norm-square-overflow", "backward-overflow", "domain-error",
     "rounds-out-of-domain", "optimizer-epsilon-underflow"}
)  # fmt: skip
"""Findings that a training which diverges may end in."""

GROWN = 10.0
"""Times the largest weight, or loss and gradients together, have to have grown."""
MOVED = 2.0
"""Times the largest weight has to have grown at least: what it has not made grow comes from elsewhere."""

_WHY = (
    "Each update makes the next gradient larger: the learning rate, its schedule or the initialization is too large, or gradients "
    "are not clipped."
)
_WHY_AT_ONCE = (
    "One update is many times as large as the weights: the learning rate is too large, or there is no warm-up."
)


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


def judge_divergence(trace: Trace, end: Finding) -> Finding | None:
    """The divergence that a finding is the end of, placed where it ends; None where the training did not grow before it."""
    if end.id not in ENDS or end.step is None or end.phase in ("generate", "static"):
        return None
    growth = growth_before(trace, end.step)
    if growth is None or not growth.diverges:
        return None
    statement = Statement(
        id="divergence",
        summary=(
            f"The training diverges: {_when(growth, end.step)} the largest weight goes from "
            f"{growth.weights[0]:,.3g} to {growth.weights[1]:,.3g}{_of_the_loss(growth)}."
        ),
        cause=(
            f"{_WHY_AT_ONCE if growth.steps == 1 else _WHY} A dtype with a wider range only ends a few steps later; float32 and bfloat16 do not help. "
            "Lower the learning rate, warm it up, or clip gradients."
        ),
        evidence=tuple(_evidence(trace, growth, end)),
    )
    return make_finding(
        statement, phase=end.phase, step=end.step, fqn=end.fqn, op=end.op, dtype=end.dtype, source=end.source
    )


def _when(growth: Growth, end: int) -> str:
    return f"in the {growth.steps} steps before step {end}" if growth.steps > 1 else "in its first update"


def _of_the_loss(growth: Growth) -> str:
    first, last = growth.losses
    return f", the loss from {first:,.3g} to {last:,.3g}" if growth.steps > 1 else ""


def _evidence(trace: Trace, growth: Growth, end: Finding) -> Iterator[str]:
    first, last = (f"{largest:,.3g}" for largest in growth.gradients)
    if growth.steps > 1:
        yield f"Largest gradient: {first} in the first step, {last} in the last one before the failure."
    else:
        yield f"Largest gradient of that step: {first}."
    where = f" at {end.source}" if end.source else ""
    yield f"It surfaces in step {end.step} as {end.id}{where}: {end.summary}"
    yield from how_the_run_ended(trace)
