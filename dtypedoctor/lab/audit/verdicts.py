"""What the trials of a kernel have shown, as a record of the trace. Nothing here imports torch, and it is read on both sides."""

from dataclasses import dataclass, field
from typing import ClassVar

GRADIENT = "gradient is not that of the forward"
UNINITIALIZED = "reads uninitialized memory"
ROUNDING = "rounding"
RANGE = "range"
RACE = "race"
BATCH = "depends on the batch"
STRIDES = "depends on the strides"
COMPILED = "compiled is not eager"
FUNCTION, OPERATOR, COMPILED_REGION = "autograd Function", "operator", "compiled region"
"""The kinds of kernels."""
WHAT_TO_DO = {
    GRADIENT: "Use the eager implementation or a release whose backward is right, and report the kernel with these ratios.",
    UNINITIALIZED: "Write every element of what `empty` allocates, or allocate zeros; mask each load beyond the end of a tensor.",
    ROUNDING: "Accumulate and save in float32 inside of the kernel, and cast its results.",
    RANGE: "Compute in float32 inside of the kernel, or subtract the maximum (scale) before the operator that overflows.",
    RACE: "Write each element once, or combine with atomics; keep nothing between calls that the arguments do not determine.",
    BATCH: "Make the result of a row independent of how many rows there are: mask the last block.",
    STRIDES: "Call `.contiguous()` on inputs and on the upstream gradient, or read by their strides.",
    COMPILED: "Call this region without `torch.compile`, and report both results to PyTorch.",
}
"""The verdicts, and what to do about each."""


@dataclass(slots=True, kw_only=True)
class KernelTried:
    """A kernel after its trials.

    Attributes:
        kernel: dotted name of the Function, ``namespace::name`` of the operator, or the name of the compiled callable.
        kind: :data:`FUNCTION`, :data:`OPERATOR` or :data:`COMPILED_REGION`.
        source: ``file.py:line`` of its first call; None where no line is known.
        dtype: of its narrowest floating-point argument.
        shapes: of its tensors.
        verdict: one of :data:`WHAT_TO_DO`; empty where no trial shows a fault.
        said: the counterfactual with its numbers; empty without a verdict.
        passed: the trials that it has passed, in words.
        not_tried: the trials that could not be made, each with the reason.
        seconds: that the trials took.
    """

    KIND: ClassVar[str] = "kernel-tried"

    kernel: str
    kind: str
    source: str | None = None
    dtype: str = ""
    shapes: list[str] = field(default_factory=list)
    verdict: str = ""
    said: str = ""
    passed: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """The verdict with its kernel, one sentence."""
        where = f", {self.source}" if self.source else ""
        return f"{self.kernel} ({self.dtype}{where}): {self.verdict}: {self.said}"
