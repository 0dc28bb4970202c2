"""What is observed of a model before it runs: its config, how it is sharded, packed weights, and what loading does to dtypes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of the module that the observation's ``fqn`` names.

    Attributes:
        root: number of the outermost module.
        dtype: that the configuration states, where it does.
        keep_in_fp32: entries of its lists of modules to keep in float32.
    """

    KIND: ClassVar[str] = "model-config"

    root: int
    dtype: str | None
    keep_in_fp32: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharded:
    dtypes: Mapping[str, list[str]]
    trainable: Mapping[str, list[str]] | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit(_Sharded):
    """A unit of FSDP2, told when its outermost module is first called; the observation's ``fqn`` is its name.

    Attributes:
        root: number of the outermost module.
        dtypes: parameter names by dtype, those of inner units aside.
        trainable: the same of those that get gradients; None in older traces.
        param_dtype, reduce_dtype, output_dtype: of its mixed-precision policy.
    """

    KIND: ClassVar[str] = "shard-unit"

    root: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCall(_Sharded):
    """A call of ``fully_shard``, before it is made, or of FSDP1, where it refuses a unit; names of parameters are relative to the unit.

    Attributes:
        api: name of what was called.
        cls: class of the module that becomes a unit.
        source: ``file.py:line`` of the call.
    """

    KIND: ClassVar[str] = "shard-call"

    api: str
    cls: str
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A process group that collectives are called on.

    Attributes:
        name: torch's name for it.
        ranks: the global ranks in it.
        backend: e.g. ``nccl``.
        rank: the global rank of this process; None in older traces.
    """

    KIND: ClassVar[str] = "process-group"

    name: str
    ranks: list[int]
    backend: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective or message as this rank calls it; the observation's ``fqn`` is the module that it belongs to.

    It is written where :class:`~dtypedoctor.trace.ranks.Succession` expects another one: a training loop that repeats itself writes
    nothing more (:func:`dtypedoctor.diagnosis.distributed.calls_of` has all of them from these and from the counts of the cursor's page).

    Attributes:
        channel: name of the process group; of messages with their ends, ``GROUP:FROM>TO``.
        number: its place among those of the channel, from 0.
        name: e.g. ``all_reduce``.
        dtype: of what this rank sends, or where it sends nothing, receives.
        shape, numel: of the first tensor, and of all together.
        source: ``file.py:line`` of the program's own code that has called it; None where none was at work.
    """

    KIND: ClassVar[str] = "collective-call"

    channel: str
    number: int
    name: str
    dtype: str
    shape: list[int]
    numel: int
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOperand:
    """An operand that was compared with a packed weight; the observation's ``fqn`` is the module that holds the weight.

    Attributes:
        of: number of the op.
        operand: index over its inputs.
        weight: name of the packed weight.
        dtype: of the operand.
        quant_dtype: dtype that the quantization state says.
        relative_error: norm of the difference over the norm of the weight; None where it is not finite.
    """

    of: int
    operand: int
    weight: str
    dtype: str
    quant_dtype: str
    relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight(ComparedOperand):
    """An operand of a product that has the shape of packed weights of the module, and the one of these that it is closest to.

    Whether the operand is meant to be that weight at all is for the reader to find out.
    """

    KIND: ClassVar[str] = "packed-weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBits(ComparedOperand):
    """An operand of a product, or of an op on the way to one, whose memory was filled in one format and is read in another.

    Its dtype is not the quantization state's, and its bits are those of the weight in the state's own dtype.
    """

    KIND: ClassVar[str] = "packed-bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded:
    """A ``load_state_dict`` that cast.

    Attributes:
        casts: elements by ``FROM->TO``.
        became_inf, became_zero: elements that were finite, or not zero, before a cast to a smaller range.
        elements: that were cast to a smaller range.
        names: a few of these tensors.
    """

    KIND: ClassVar[str] = "state-loaded"

    casts: Mapping[str, int]
    became_inf: int
    became_zero: int
    elements: int
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedAndTrained:
    """Parameters that lost bits when a state was loaded into them, in the groups of an optimizer that is about to step.

    Attributes:
        casts: elements by ``FROM->TO``.
        rounded: elements whose value the cast changed.
        elements: of these parameters.
        parameters: how many.
        names: a few of them.
        mean_change: mean relative change of the values that were rounded.
    """

    KIND: ClassVar[str] = "rounded-and-trained"

    casts: Mapping[str, int]
    rounded: int
    elements: int
    parameters: int
    names: list[str]
    mean_change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStateCast:
    """State of an optimizer that lost bits when it was loaded, and that it is about to step with.

    Attributes:
        optimizer: its class.
        casts: elements by ``FROM->TO``.
        keys: names of the state.
        parameters: how many it belongs to.
        rounded: of the elements that were compared, those that the cast changed.
        compared: elements that were compared.
    """

    KIND: ClassVar[str] = "optimizer-state-cast"

    optimizer: str
    casts: Mapping[str, int]
    keys: list[str]
    parameters: int
    rounded: int
    compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsStoredInHalf:
    """Means of squared gradients that were stored in float16, and that an optimizer is about to step with.

    Attributes:
        optimizer: its class.
        keys: names of the state.
        parameters: how many it belongs to.
        became_zero: elements that are 0 though another mean of the same gradients is not.
        became_inf: elements that are inf.
        compared: elements that were looked at.
    """

    KIND: ClassVar[str] = "moments-stored-in-half"

    optimizer: str
    keys: list[str]
    parameters: int
    became_zero: int
    became_inf: int
    compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model that transformers' ``from_pretrained`` has loaded.

    Attributes:
        model: its class.
        stored, loaded: elements by dtype, in the checkpoint and in the model.
        requested: dtype that was asked for, or None.
    """

    KIND: ClassVar[str] = "pretrained"

    model: str
    stored: Mapping[str, int]
    loaded: Mapping[str, int]
    requested: str | None
