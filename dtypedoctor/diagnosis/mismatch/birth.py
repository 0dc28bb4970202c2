"""The named reasons for which a tensor has its dtype."""

from dataclasses import dataclass
from enum import StrEnum

from dtypedoctor.diagnosis.finding import Link
from dtypedoctor.trace.events import Op

__all__ = ["Birth", "Reason"]


class Reason(StrEnum):
    """Why a tensor has its dtype; the values are what reports say."""

    NORM = "norm"
    """The weight of a norm."""
    BUFFER = "buffer"
    EMBEDDING = "embedding"
    AUTOCAST_LIST = "autocast-list"
    """An op on autocast's own list, whose operands or result it casts."""
    QUANT_STATE = "quant-state"
    """What a packed weight was dequantised to."""
    REINTERPRETED = "reinterpreted"
    """A packed weight, dequantised to one format and read as another."""
    COMPUTE_DTYPE = "compute-dtype"
    """A 4-bit layer that computes in a dtype of its own."""
    ADAPTER = "adapter"
    MODULES_TO_SAVE = "modules-to-save"
    """peft's fully trained copy of a module."""
    KEEP_IN_FP32 = "keep-in-fp32"
    """A parameter that the model's keep list left in float32."""
    FSDP_OUTPUT = "fsdp-output"
    """The output dtype of a shard unit's mixed-precision policy."""
    ATTRIBUTE = "attribute"
    """A tensor that is a plain attribute of a module, which ``module.to(dtype)`` does not touch."""
    CACHE = "cache"
    """Memory that outlives the call and is written to in it."""
    MODEL_INPUT = "model-input"
    LOAD_DTYPE = "load-dtype"
    """A parameter that is in this dtype for no reason that the trace shows: it was made or loaded so."""
    INPLACE = "inplace"
    """An op that writes to memory which exists already, where autocast casts nothing."""
    CUSTOM_FUNCTION = "custom-fwd"
    """A custom autograd function that does not carry its autocast region over into the backward pass, or carries it too far."""
    CAST = "cast"
    """A cast that the code asks for."""
    FACTORY = "factory"
    """A tensor made on the spot (``torch.zeros``), in the default dtype or one that was named."""
    ELSEWHERE = "elsewhere"
    """Nothing that the trace shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """Where the dtype of a tensor comes from.

    Attributes:
        reason: the named reason.
        dtype: the dtype.
        root, fqn: the module where it was born: the one that holds the tensor ``name``, else the one whose code ran.
        name: the parameter, buffer, attribute, input or packed weight that gave the dtype, where it is one.
        op: the op at which the tensor got this dtype; None where no op of the window did.
        promoted: the op of mixed dtypes, nearest to the birth, whose result took over the wider one.
        quant_dtype: the dtype that was dequantised to, where the tensor goes back to a packed weight.
        chain: from the operand back, views left out; the last link names the reason.
    """

    reason: Reason
    dtype: str
    root: int
    fqn: str | None
    name: str | None = None
    op: Op | None = None
    promoted: Op | None = None
    quant_dtype: str | None = None
    chain: tuple[Link, ...] = ()
