"""What a model says about itself, and how it is sharded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["ModelConfig", "ProcessGroup", "ShardCall", "ShardUnit"]


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
class ShardUnit:
    """A unit of FSDP2, told when its outermost module is first called; the observation's ``fqn`` is its name.

    Attributes:
        root: number of the outermost module.
        dtypes: parameter names by dtype, those of inner units aside.
        trainable: the same of those that get gradients; None in older traces.
        param_dtype, reduce_dtype, output_dtype: of its mixed-precision policy.
    """

    KIND: ClassVar[str] = "shard-unit"

    root: int
    dtypes: Mapping[str, list[str]]
    trainable: Mapping[str, list[str]] | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCall:
    """A call of ``fully_shard``, before it is made, or of FSDP1, where it refuses a unit.

    Attributes:
        api: name of what was called.
        cls: class of the module that becomes a unit.
        source: ``file.py:line`` of the call.
        dtypes, trainable, param_dtype, reduce_dtype, output_dtype: as in :class:`ShardUnit`, names being relative to the unit.
    """

    KIND: ClassVar[str] = "shard-call"

    api: str
    cls: str
    source: str | None
    dtypes: Mapping[str, list[str]]
    trainable: Mapping[str, list[str]] | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A process group that collectives are called on.

    Attributes:
        name: torch's name for it.
        ranks: the global ranks in it.
        backend: e.g. ``nccl``.
    """

    KIND: ClassVar[str] = "process-group"

    name: str
    ranks: list[int]
    backend: str
