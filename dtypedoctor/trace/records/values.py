"""Where values that are not finite get to, and what experiments and scalers say of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["AttentionReplayed", "NonfiniteReached", "Unscaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteReached:
    """Something that is not finite got somewhere, outside of all modules or from there.

    Attributes:
        what: where it got: ``call``, ``item`` (a number in Python), ``guard`` (a test for finiteness), ``loss``, ``gradient``,
            ``numbers`` (out of torch), ``saved`` (into a file or to another
            process), ``alive`` (to the end of the program), ``unused`` (nowhere).
        id: of the tensor, as in :class:`~dtypedoctor.trace.events.TensorNote`; 0 where that is not known.
        source: ``file.py:line`` that reads or uses it.
        value: ``nan``, ``inf`` or ``-inf``, where known.
        sample: number of the sample that it was measured in, where it is a loss or gradient.
    """

    KIND: ClassVar[str] = "nonfinite-reached"

    what: str
    id: int
    source: str | None = None
    value: str | None = None
    sample: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReplayed:
    """Attention whose softmax made NaN, run again on the same operands.

    Attributes:
        scores, softmax: numbers of these ops.
        scale: by which the program multiplied the scores.
        nan_rows: rows that the program's own softmax made NaN.
        unattended: those of them in which its mask leaves nothing to look at.
        exact_finite: whether the softmax is finite with scores in float32.
        unmasked_finite: whether that is without the mask.
        sdpa_finite, sdpa_absmax: what ``scaled_dot_product_attention`` returns.
    """

    KIND: ClassVar[str] = "attention-replay"

    scores: int
    softmax: int
    nan_rows: int
    unattended: int
    exact_finite: bool
    unmasked_finite: bool
    sdpa_finite: bool
    sdpa_absmax: float
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscaled:
    """A gradient scaler is about to unscale the gradients of an optimizer; told again whenever a field but the scale changes.

    Attributes:
        scale: the loss scale.
        optimizer: class of the optimizer.
        params, gradients: number of parameters and of gradients by dtype.
        names: some trainable parameters by half-precision dtype.
        frozen: parameters that do not require a gradient.
        strangers: parameters that belong to no module that was called.
    """

    KIND: ClassVar[str] = "unscale"

    scale: float
    optimizer: str = ""
    params: Mapping[str, int]
    gradients: Mapping[str, int]
    names: Mapping[str, list[str]]
    frozen: int = 0
    strangers: int = 0
