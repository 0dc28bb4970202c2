"""What is observed of a model before it runs (config, sharding, packed weights, what loading does to dtypes), and while it runs: where non-finite
values get to, autocast regions, torch.compile, CUDA streams."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteReached:
    """Something that is not finite got somewhere, outside of all modules or from there.

    Attributes:
        what: where it got: ``call``, ``item`` (a number in Python), ``asserted`` (one that an assertion has
            accepted), ``guard`` (a test for finiteness), ``asked`` (the same by an operator), ``returned`` (by an outermost module), ``loss``, ``gradient``, ``numbers`` (out of torch), ``saved`` (into a file or to another process),
            ``alive`` (to the end of the program), ``unused`` (nowhere).
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
class ComputedInstead:
    """An operator has returned finite values in float32 or wider in what the program runs because a test has found a value that is not finite.

    Attributes:
        id: of the tensor that was tested, as in :class:`NonfiniteReached`.
        op: the operator.
    """

    KIND: ClassVar[str] = "computed-instead"

    id: int
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedSince:
    """An operator outside of modules has returned that had raised an exception on operands of the same shapes.

    Attributes:
        caught: number of the record of that exception.
    """

    KIND: ClassVar[str] = "returned-since"

    caught: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPassed:
    """A test, or a part of one, has ended as it should.

    Attributes:
        since: number of a record before it began.
        expects: whether it expects what is in it: an exception, or an output that names inf or NaN.
    """

    KIND: ClassVar[str] = "test-passed"

    since: int
    expects: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """A Trainer that leaves losses which are not finite out of the mean that it logs (``logging_nan_inf_filter``): 0 where none is finite.

    Attributes:
        trainer: its class.
    """

    KIND: ClassVar[str] = "log-filter"

    trainer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedBefore:
    """The operator whose rounding makes a later one fail: with it and all between the two in float32, the later one is finite.

    Attributes:
        of: number of the op that makes inf or NaN.
        n: number of the op that rounds; 0 where it is not recorded.
        op, source, module: what it is, its line and its module.
        parameter: name of the parameter that a cast has rounded.
        dtype: of its result.
        scalars: its numbers, as text.
        elements: of its result.
        zeros, ones, overflows: those of them that are 0, 1 or not finite, and would be something else in float32.
    """

    KIND: ClassVar[str] = "rounded-before"

    of: int
    n: int
    op: str
    source: str | None
    module: str | None
    parameter: str
    dtype: str
    scalars: list[str]
    elements: int
    zeros: int
    ones: int
    overflows: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastRegion:
    """An autocast region that was entered; each different one is written once.

    Attributes:
        device: the device type whose operators it casts.
        wanted: the dtype that was asked for.
        enabled: False for a region that switches autocast off, and where torch disabled it (no such device).
        source: ``file.py:line`` of the code that entered it; None for one that was open when the watch began.
        off: whether the program itself asked for a region that casts nothing.
    """

    KIND: ClassVar[str] = "autocast-region"

    device: str
    wanted: str
    enabled: bool
    source: str | None
    off: bool = False

    @property
    def dtype(self) -> str | None:
        """The dtype it casts to, None where it casts nothing."""
        return self.wanted if self.enabled else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRegions:
    """The regions that were open when an op raised.

    Attributes:
        of: number of the op.
        device: type of its operands' device.
        regions: from the outermost in.
    """

    KIND: ClassVar[str] = "autocast-regions"

    of: int
    device: str
    regions: list[AutocastRegion]


EAGER = "eager"
"""Why a compiled call was made again that is finite when nothing is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedCall:
    """A module call, or an optimizer step, was made again in the running program, with the op trace on; the operators bear its step and call.

    Attributes:
        why: ``raised``, ``backward raised``, ``value`` or ``gradient`` (something was not finite), ``packed`` (its packed weights may be
            dequantized wrongly), ``optimizer`` (its step has made a parameter inf or NaN), ``eager`` (compiled, it was not finite, and its replay,
            which is not, is).
        compared: whether what it returned or raised could be compared with what the call itself had.
        doubt: how it differed, as a clause; None where it did not.
        late: whether an optimizer had stepped since, and the parameters are those of then.
        copies: whether its parameters are copies that were made when it began.
        rounds: whether what it returned differs by rounding alone, as what is compiled does from the same in eager mode.
    """

    KIND: ClassVar[str] = "replayed-call"

    why: str
    compared: bool
    doubt: str | None = None
    late: bool = False
    copies: bool = False
    rounds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomFunction:
    """A custom ``autograd.Function`` whose backward begins; the observation's ``fqn`` is the module that its forward ran in.

    Attributes:
        function: its name.
        decorated: whether its forward is decorated with ``custom_fwd``.
        fwd_used_autocast: what ``custom_fwd`` has noted: whether autocast was on in the forward.
        forward_autocast: dtype of the region that the forward ran in; None outside of any.
        forward_source: ``file.py:line`` of the forward.
    """

    KIND: ClassVar[str] = "custom-function"

    function: str | None
    decorated: bool
    fwd_used_autocast: bool | None
    forward_autocast: str | None
    forward_source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCounts:
    """How many graphs Dynamo made; one record for a run in which it did anything."""

    KIND: ClassVar[str] = "compile"

    unique_graphs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """Graph breaks at one line of code for one reason; the observation's ``fqn`` is the module whose code stands there.

    Attributes:
        kind: Dynamo's name for the break, e.g. ``Unsupported method call``.
        explanation: its explanation, first line.
        context: debug context of the first of them, cut; it names the types and functions involved.
        frames: stack of the first of them as ``file:line function``, outermost first, those of torch and of
            Python's standard library left out.
        count: how often it happened.
    """

    KIND: ClassVar[str] = "graph-break"

    kind: str
    explanation: str
    context: str
    frames: list[str]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompiled:
    """A function that was compiled again.

    Attributes:
        function: its name; ``torch_dynamo_resume_in_F_at_L`` is the rest of F after a graph break at line L.
        place: ``file:line`` of its definition.
        count: how often.
        guards: the distinct guards that failed, in Dynamo's words; a few of them.
    """

    KIND: ClassVar[str] = "recompile"

    function: str
    place: str
    count: int
    guards: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecompileLimit:
    """Dynamo stopped compiling a function: what is not in its cache runs in eager mode from now on.

    The observation's ``fqn`` is the module whose code the function is.

    Attributes:
        limit: name of the limit in ``torch._dynamo.config``.
        value: its value.
        function, place: as in :class:`Recompiled`.
        guard: the guard that failed last, in Dynamo's words.
    """

    KIND: ClassVar[str] = "recompile-limit"

    limit: str
    value: int
    function: str
    place: str
    guard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerCall:
    """A call of compiled code that was made again on the same input in eager mode.

    Attributes:
        finite, absmax: of what the call returned.
        eager_finite, eager_absmax: of the same call in eager mode.
    """

    KIND: ClassVar[str] = "eager-replay"

    finite: bool
    absmax: float
    eager_finite: bool
    eager_absmax: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLaunches:
    """Kernel launches that were alike.

    Attributes:
        device: the device whose memory was worked on.
        used: handle of the CUDA stream that was launched on.
        current: handle of the stream that was current on ``device``.
        count: number of launches.
        stale: whether the launches went to another stream than the current one.
    """

    KIND: ClassVar[str] = "cuda-stream"

    device: str
    used: int
    current: int
    count: int
    stale: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEnds:
    """How far an optimizer's parameters have moved from where they started, by some elements of each; the lists go together.

    Attributes:
        steps: how many steps it had taken then.
        names: dotted names of the parameters.
        dtypes: theirs.
        sampled: elements that were compared.
        moved: how many of them are not what they were before the first step.
        distance: the norm of their changes.
        norm: of their values at the end.
        states: dtypes of the tensors of their size that the optimizer keeps for each, joined by a comma; empty in older traces.
    """

    KIND: ClassVar[str] = "parameter-ends"

    steps: int
    names: list[str]
    dtypes: list[str]
    sampled: list[int]
    moved: list[int]
    distance: list[float]
    norm: list[float]
    states: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedBy:
    """An optimizer that has made steps, told once something is not finite.

    Attributes:
        optimizer: its class.
        eps: whether it may have an epsilon, and so divide by something that may be zero: an option says so, or it is not one of torch's.
    """

    KIND: ClassVar[str] = "stepped-by"

    optimizer: str
    eps: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSteps:
    """The steps of several optimizers, told at the end; where there is only one, the number of the last step tells them.

    Attributes:
        optimizers: how many have made a step, or would have but for a gradient scaler.
        done, skipped: steps of all of them.
    """

    KIND: ClassVar[str] = "optimizer-steps"

    optimizers: int
    done: int
    skipped: int


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
    """A call of ``fully_shard``, before it is made, or of FSDP1, where it rejects a unit; names of parameters are relative to the unit.

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


GARBAGE = 0.1
"""Relative error above which a matrix is not the packed weight; rounding to bfloat16 makes 0.002."""


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

    @property
    def is_wrong(self) -> bool:
        """Whether the operand is something else than the packed weight."""
        return self.relative_error is None or self.relative_error > GARBAGE


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
        source: line of the program that loaded it.
    """

    KIND: ClassVar[str] = "state-loaded"

    casts: Mapping[str, int]
    became_inf: int
    became_zero: int
    elements: int
    names: list[str]
    source: str | None = None


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
        source: line of the program that loaded it.
    """

    KIND: ClassVar[str] = "rounded-and-trained"

    casts: Mapping[str, int]
    rounded: int
    elements: int
    parameters: int
    names: list[str]
    mean_change: float
    source: str | None = None


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
        source: line of the program that loaded it.
    """

    KIND: ClassVar[str] = "optimizer-state-cast"

    optimizer: str
    casts: Mapping[str, int]
    keys: list[str]
    parameters: int
    rounded: int
    compared: int
    source: str | None = None


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
        source: line of the program that loaded it.
    """

    KIND: ClassVar[str] = "moments-stored-in-half"

    optimizer: str
    keys: list[str]
    parameters: int
    became_zero: int
    became_inf: int
    compared: int
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model that transformers' ``from_pretrained`` has loaded.

    Attributes:
        model: its class.
        stored, loaded: elements by dtype, in the checkpoint and in the model.
        requested: dtype that was asked for, or None.
        source: line of the program that loaded it.
    """

    KIND: ClassVar[str] = "pretrained"

    model: str
    stored: Mapping[str, int]
    loaded: Mapping[str, int]
    requested: str | None
    source: str | None = None
