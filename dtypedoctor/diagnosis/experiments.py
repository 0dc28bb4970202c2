"""What was found out by running a piece of the program again in another way."""

from dataclasses import dataclass, fields

from dtypedoctor.trace.events import Op
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.values import AttentionReplayed

__all__ = ["AttentionExperiment", "attention_experiment"]

SDPA = "torch.nn.functional.scaled_dot_product_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionExperiment:
    """Attention that was written out in steps, run again on the same operands.

    Attributes:
        nan_rows: rows that the program's own softmax made NaN.
        unattended: those of them in which its mask leaves nothing to look at.
        exact_finite: whether the softmax is finite with scores in float32.
        unmasked_finite: whether it is without the mask.
        sdpa_finite, sdpa_absmax: what fused attention returns.
    """

    nan_rows: int
    unattended: int
    exact_finite: bool
    unmasked_finite: bool
    sdpa_finite: bool
    sdpa_absmax: float

    @property
    def is_of_the_mask(self) -> bool:
        """Whether every row that is NaN is one in which everything is masked."""
        return self.unattended == self.nan_rows and self.unmasked_finite

    @property
    def is_of_the_scores(self) -> bool:
        """Whether keeping the scores in float32 is all that it takes."""
        return self.exact_finite and self.sdpa_finite and self.unattended < self.nan_rows

    @property
    def evidence(self) -> tuple[str, ...]:
        """What was measured, in sentences."""
        rows = f"The softmax makes {self.nan_rows} rows NaN; in {self.unattended} of them the mask leaves nothing."
        if self.is_of_the_mask:
            return (rows, "With the same scores and no mask it is finite.")
        if self.is_of_the_scores:
            return (
                f"The same queries, keys, values, scale and mask through {SDPA} are finite, absmax {self.sdpa_absmax:.6g}.",
            )
        return (rows,)


def attention_experiment(trace: Trace, op: Op) -> AttentionExperiment | None:
    """The experiment on the attention that ``op`` is the product of queries and keys of, or the softmax; None without one."""
    for seen in trace.observed(AttentionReplayed):
        what = seen.what
        if op.n in (what.scores, what.softmax):
            return AttentionExperiment(
                **{field.name: getattr(what, field.name) for field in fields(AttentionExperiment)}
            )
    return None
