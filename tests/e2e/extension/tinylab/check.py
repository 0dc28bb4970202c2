"""A check: a loss in half precision. What watches, what it writes, and the rule that reads it. Nothing here imports torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.plugins import Check
from dtypedoctor.rules import SILENT, Finding, FindingSpec, Rule, Severity, Statement, Trace, make_finding_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfLoss:
    """A loss that a backward pass began from."""

    KIND: ClassVar[str] = "tinylab-half-loss"

    dtype: str
    value: float


class HalfLosses(Observer):
    """Writes a :class:`HalfLoss` for the first loss in float16 or bfloat16."""

    def before_backward(self, tensors: list[Any]) -> None:
        """A backward pass begins, in each step: a value is read, which waits for a GPU, only where there is something to tell."""
        for loss in tensors:
            dtype = str(loss.dtype).removeprefix("torch.")
            if dtype in ("float16", "bfloat16") and loss.numel() == 1:
                self.session.once(HalfLoss(dtype=dtype, value=float(loss)), dtype)


SPEC = FindingSpec(
    id="tinylab-half-loss",
    title="The loss is computed in half precision",
    family=SILENT,
    severity=Severity.WARNING,
    do_this="Compute the loss in float32: cast the logits before it, `loss(logits.float(), labels)`.",
    page=Path(__file__).with_name("half_loss.md"),
)


def detect(trace: Trace) -> Iterator[Finding]:
    """The first such loss."""
    for seen in trace.observed(HalfLoss)[:1]:
        said = Statement(
            id=SPEC.id,
            severity=SPEC.severity,
            summary=f"The loss of step {seen.step} is {seen.what.dtype}.",
            cause=f"{seen.what.dtype} has few digits: small changes of the loss are not seen, and its gradient begins rounded.",
            evidence=(f"It is {seen.what.value:.4g}.",),
        )
        yield make_finding_of(seen, said, dtype=seen.what.dtype)


CHECK = Check(name="tinylab-half-loss", observe="tinylab.check:HalfLosses", records=(HalfLoss,))
RULE = Rule(name="tinylab-half-loss", specs=(SPEC,), detect=detect)
