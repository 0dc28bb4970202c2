"""What came of scoring rollouts again. Nothing here imports torch, and it is read on both sides."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SAME, ROUNDING, GAP = "same", "rounding", "gap"
"""The verdicts: no gap, one that the dtype's rounding makes, and one that it does not."""
SAMPLING, WEIGHTS, PADDING, DTYPE, SHIFT = "sampling", "weights", "padding", "dtype", "shift"
"""What was changed."""
OF_ROUNDING = frozenset({PADDING, DTYPE})
"""Changes that may move scores by rounding alone."""
WHAT_TO_DO = {
    SAMPLING: (
        "Compare the same distribution on both sides: have the generator return raw log-probabilities, or renormalize the trainer's over the tokens "
        "that temperature, top-p and top-k leave (vLLM: `logprobs_mode`)."
    ),
    WEIGHTS: "Send the trained weights to the generator before it generates: merged once, in one dtype, and all of them.",
    PADDING: "Give the model the attention mask and positions that count from the first token that is no padding, or pad on the right.",
    DTYPE: "Compute both log-probabilities in one dtype. float16 has 3 bits more than bfloat16, and float32 leaves nothing.",
    SHIFT: "Pair each log-probability with its own token: logits at a position are those of the next one.",
}
"""What to do about the change that explains a gap."""
UNEXPLAINED = (
    "Try the generator's weights (`--with FOLDER`), and name temperature, top_p and top_k if the file does not. Then compare token ids, chat template, "
    "the generator's kernels and its KV cache's dtype."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Log-probabilities beside others of the same tokens.

    Attributes:
        tokens: compared.
        nonfinite: others, whose log-probability is inf or NaN.
        outside: share of them whose ratio is below 0.9 or above 1.1.
        mean, mean_abs, largest: of the difference, of its magnitude, and the largest magnitude.
        kl: mean of exp(d) - 1 - d, which estimates how far the policy is from the one that drew the tokens.
    """

    tokens: int
    nonfinite: int
    outside: float
    mean: float
    mean_abs: float
    largest: float
    kl: float

    @property
    def distance(self) -> float:
        """The mean magnitude, infinity where some are not finite."""
        return math.inf if self.nonfinite else self.mean_abs


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing changed, and the rollouts scored again.

    Attributes:
        kind: one of :data:`WHAT_TO_DO`.
        said: the change in words.
        gap: to the generator's log-probabilities.
        moves: how far the scores are from those without the change.
        on_top_of: changes that were made before it and stay.
        taken: whether it removes the most, so that further changes are made on top of it.
    """

    kind: str
    said: str
    gap: Gap
    moves: Gap
    on_top_of: tuple[str, ...] = ()
    taken: bool = False


@dataclass(slots=True, kw_only=True)
class Parity:
    """The gap of a generator and a trainer, and what it is made of.

    Attributes:
        model, rollouts: folder and file.
        rows: scored, of ``of_rows``.
        baseline: how the trainer is taken to score, in words.
        gap: of that to the generator.
        rounding: mean difference that rounding makes of the trainer's own scores.
        of_bfloat16: what bfloat16's makes of them.
        floor: mean difference that float32 leaves.
        changes: in the order in which they were tried.
        notes: measurements beside.
        not_tried: what was not changed, each with the reason.
    """

    model: str
    rollouts: str
    rows: int
    of_rows: int
    baseline: str
    gap: Gap
    rounding: float
    of_bfloat16: float
    floor: float
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)

    @property
    def causes(self) -> list[Change]:
        """The changes that together leave at most half of the gap; empty where none do."""
        taken = [change for change in self.changes if change.taken]
        return taken if taken and taken[-1].gap.distance <= self.gap.distance / 2 else []

    @property
    def verdict(self) -> str:
        """:data:`SAME`, :data:`ROUNDING` or :data:`GAP`."""
        if self.gap.distance <= self.floor:
            return SAME
        named = {change.kind for change in self.causes} - OF_ROUNDING
        return GAP if named or self.gap.distance > 3 * self.rounding else ROUNDING

    def data(self) -> dict[str, Any]:
        """As JSON; :meth:`of` is the reverse."""
        return {"verdict": self.verdict, "causes": [change.said for change in self.causes], **asdict(self)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Parity":
        """From what :meth:`data` returns."""
        fields = {name: value for name, value in data.items() if name not in ("verdict", "causes")}
        changes = [
            Change(**change | {"gap": Gap(**change["gap"]), "moves": Gap(**change["moves"])})
            for change in fields["changes"]
        ]
        return cls(**fields | {"gap": Gap(**fields["gap"]), "changes": changes})
