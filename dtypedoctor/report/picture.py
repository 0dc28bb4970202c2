"""What a person looks at in a trace: modules × steps, which dtypes flow where, and the ops that were traced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LANES = ("forward", "generate", "backward", "gradients", "parameters")
"""Outputs in the forward pass (recomputation included), outputs while generating, gradients of outputs, gradients of
parameters, parameters after the optimizer step. The last two belong to the module that holds the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The magnitude of one module in one lane and one dtype, column by column.

    Attributes:
        absmax: the largest absmax of each column, NaN where nothing was measured (an ``array`` of float64, to be small).
        nonfinite: number of NaN and of inf elements, for the columns that have any.
    """

    lane: str
    dtype: str
    absmax: Sequence[float]
    nonfinite: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLine:
    """One tensor of a module over the whole run; ``absmax`` is its largest."""

    what: str
    phase: str
    dtype: str
    shape: tuple[int, ...]
    absmax: float
    num_nan: int
    num_inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLine:
    """Dtypes that enter and leave a module in one phase; ``why`` says what changes them, empty where nothing does."""

    phase: str
    step: int
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    autocast: str | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePicture:
    """One module of the tree; ``root`` tells several models of one process apart."""

    root: int
    fqn: str
    cls: str
    series: tuple[Series, ...] = ()
    tensors: tuple[TensorLine, ...] = ()
    flows: tuple[FlowLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLine:
    """One traced op. ``born`` marks an op that made non-finite elements of finite operands."""

    fqn: str
    phase: str
    step: int
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str | None
    notes: tuple[str, ...] = ()
    born: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One run.

    Attributes:
        label: name of the run, e.g. ``before``.
        columns: the step, or the steps, that each column stands for.
        modules: in the order in which they were first seen.
        notes: what else happened: exceptions, corrections.
    """

    label: str
    columns: tuple[str, ...]
    modules: tuple[ModulePicture, ...]
    ops: tuple[OpLine, ...] = ()
    notes: tuple[str, ...] = ()
