"""The records of a trace. Every record is a frozen value with a stable short name; the file format is one JSON array or object a line.

A trace is written by a worker and read by everything else, so this file imports nothing but the standard library.

Coordinates shared by many records:

* ``n``: the sequence number of the event within its process; it orders events even where a record reaches the disk later.
* ``step``: the training step being worked on, counted from 1 (the number of optimizer steps done, plus one).
* ``call``: the number of the outermost module call being worked on, counted from 1 over the whole process.
* ``phase``: ``load`` ``forward`` ``backward`` ``recompute`` ``optimizer`` ``generate`` ``probe`` ``compile``.
* ``root``: the number of the outermost module (a model), in the order in which they were first seen.

Dtypes are torch's names without the prefix. Shapes are lists of ints; -1 stands for a dimension that varies.
Magnitudes are taken over the finite elements only, so no record ever holds NaN or inf.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

SCHEMA = 1

AFTER_STEP = "after the optimizer"
"""Phase of what happens behind an optimizer's step, outside of modules, before a module is called or a backward pass begins."""

Json = Any  # what json.loads returns

What_co = TypeVar("What_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First record of every trace file."""

    schema: int = SCHEMA
    created: float = 0.0
    pid: int = 0
    rank: int = 0
    world_size: int = 1
    watched: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions, devices and settings of the worker."""

    values: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A step of the scenario begins (``index`` from 0)."""

    n: int
    index: int
    name: str
    workload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """An outermost module was seen for the first time."""

    root: int
    cls: str
    modules: int
    dtypes: Mapping[str, int]
    """Parameter elements per dtype."""
    absorbs: Mapping[str, str] = field(default_factory=dict)
    """Numbers of earlier roots that are inside of this one, with their dotted names in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNote:
    """A parameter or buffer, noted once and again whenever its dtype changes.

    ``quant`` describes packed storage: ``{"kind": "nf4", "dtype": quant_state.dtype, "compute_dtype", "storage_dtype",
    "nested": bool, "offset_dtype", "absmax_dtype", "blocksize"}``. ``set_at`` is ``/path/file.py:line`` of the program's own line that
    gave it this dtype, ``set_by`` what that line calls (``model.head.float()``), ``set_span`` the call's first and last line and
    first and last column (bytes).
    """

    n: int
    root: int
    name: str
    dtype: str
    shape: list[int]
    requires_grad: bool = False
    buffer: bool = False
    owner: str = ""
    """Class of the module that holds it."""
    quant: Mapping[str, Json] | None = None
    set_at: str | None = None
    set_by: str = ""
    set_span: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place where tensors are measured, described once and referred to by ``id`` in samples.

    ``kind`` is ``output``, ``input`` (of a module whose output is not finite), ``grad_output`` (gradient of a module output),
    ``grad`` (gradient of a parameter, as an optimizer step finds it), ``accumulated`` (gradient of a tensor, as a backward pass
    leaves it), ``param`` (a parameter after the optimizer step), ``initial`` (a parameter before the first one), ``loss`` (what a
    backward pass starts from), ``sent`` or ``received`` (a tensor of a collective), ``operator`` (result of an operator outside of
    all modules; ``fqn`` is its name and line) or ``entered`` (a module was entered; never measured). ``index`` is the path inside a structured output (``""`` for a
    plain tensor). ``autocast`` is the enabled autocast dtype of the tensor's device, or None.
    """

    id: int
    root: int
    fqn: str
    cls: str
    phase: str
    kind: str
    index: str
    dtype: str
    shape: list[int]
    device: str = "cpu"
    autocast: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured tensor. ``absmax`` is over finite elements; ``num_nan`` and ``num_inf`` count the others.

    On disk samples come in lines of their own: ``["s", n, step, call, [[site, absmax, num_nan, num_inf], ...]]``,
    the counts left out where both are zero. Each row's own ``n`` is the line's plus its place in it.
    """

    n: int
    step: int
    call: int
    site: int
    absmax: float
    num_nan: int = 0
    num_inf: int = 0

    @property
    def finite(self) -> bool:
        """Whether every element was finite."""
        return not (self.num_nan or self.num_inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Which dtypes enter and leave a module, noted when a combination is first seen."""

    n: int
    step: int
    call: int
    phase: str
    root: int
    fqn: str
    cls: str
    inputs: list[str]
    outputs: list[str]
    weights: list[str] = field(default_factory=list)
    autocast: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNote:
    """A tensor as an operand or result of one op.

    ``id`` is equal for two notes exactly when they are the same tensor in the same version within one op trace.
    ``name`` is the parameter, buffer, plain attribute or model input whose memory it is (whole, perhaps transposed), where
    known, and ``origin`` says which: ``parameter`` ``buffer`` ``attribute`` ``input``; it is ``gradient``, without a name, for
    that of a parameter outside of modules. ``storage`` is equal for two notes exactly when they share memory; 0 where that is
    unknown. ``made_by`` and ``made_at``: of one without an origin and of an input, what gave it its dtype outside of modules, and the line. ``selected_away``: of an operand, whether it has inf or NaN and none of them gets into the result of its op.
    """

    id: int
    dtype: str
    shape: list[int]
    absmax: float | None = None
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0
    name: str | None = None
    origin: str = ""
    storage: int = 0
    selected_away: bool = False
    made_by: str = ""
    made_at: str = ""

    @property
    def finite(self) -> bool:
        """Whether every element was finite (also true where nothing was measured)."""
        return not (self.num_nan or self.num_posinf or self.num_neginf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator call inside the op trace's window, in execution order.

    ``error`` is the message with which the op itself raised. ``function`` names the custom ``autograd.Function`` in
    whose forward or backward the op ran. ``autocast`` is the dtype of the autocast region the Python code was in.
    ``scalars`` holds the non-tensor arguments that decide a verdict (e.g. a fill value), as text. A function or module
    call that refused its operands before any operator ran is an op too, named ``aten.NAME.default`` where such an operator
    exists, else ``function.NAME`` or ``module.CLASS``. ``root`` is the outermost module that
    ``fqn`` belongs to, -1 for an op outside of every module call. ``node`` is the autograd node whose backward the op is part of,
    where the op was recorded by the sentinel; ``sentinel`` says that it was, and not by the op trace: then only ops that make, use
    or replace inf or NaN are recorded. ``by_name``: of a cast, whether its line names the dtype
    (``x.float()``, ``x.to(torch.float32)``) instead of taking it from a variable or another tensor. ``takes``: of an op that raised, whether
    each of its positional arguments is a ``tensor`` or something else.
    """

    n: int
    step: int
    call: int
    phase: str
    fqn: str
    op: str
    inputs: list[TensorNote]
    outputs: list[TensorNote]
    source: str | None = None
    inplace: bool = False
    out_variant: bool = False
    function: str | None = None
    autocast: str | None = None
    scalars: list[str] = field(default_factory=list)
    error: str | None = None
    root: int = 0
    node: str | None = None
    sentinel: bool = False
    by_name: bool = False
    takes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The op with number ``of`` was run again on the same operands in another way.

    ``how`` is ``float32`` or ``float64`` (wider), ``float32-program`` (on the operands that the program would have, were everything before it
    that is known in float32), ``float64-program``, ``other-values`` (with other numbers in its floating-point operands), ``equal-dtypes`` (all in the widest), ``all-as-DTYPE``
    or ``narrowest-dtype``. ``note`` is the message of a replay that raised,
    ``dtype`` the dtype of the result of one that did not; ``exact``, of the ``float32-program``, whether it begins with nothing that was rounded before,
    and ``of_numbers``, whether with nothing but single numbers in the code.
    """

    n: int
    of: int
    how: str
    finite: bool
    absmax: float | None
    note: str = ""
    dtype: str | None = None
    exact: bool = False
    of_numbers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception reached the top of a workload or script.

    ``frames`` are the innermost stack frames as ``file:line function``, outermost first; ``modules`` the module calls
    that were open, outermost first; for a failed check of a recomputation, the module that was recomputed. ``op`` is the
    operator that raised, where one was called from Python, as it is while operators are looked at.
    """

    n: int
    step: int
    call: int
    phase: str
    type: str
    message: str
    frames: list[str]
    modules: list[str]
    function: str | None = None
    op: str | None = None
    spans: list[list[int]] = field(default_factory=list)
    """For each frame the first and last line and first and last column (bytes) of what it was doing; empty where Python does not know them."""
    caught: bool = False
    """Whether the program went on. Such a record is made from a :class:`Caught` when a run is judged, and never written."""
    thread: bool = False
    """Whether it ended a thread of a program that went on; else that caught it."""
    by_statement: bool = False
    """Whether a ``raise`` or ``assert`` of the innermost frame raised it, and not C code that the frame called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caught(Raised):
    """An exception where it was raised, whether or not the program caught it.

    ``modules`` are the module calls that it left, outermost first. ``ending`` marks one because of which the program ended
    itself or, with ``thread``, one of its threads, ``tested`` one that was raised in a test. ``root`` is the number of the outermost module, -1
    outside of all.
    """

    ending: bool = False
    tested: bool = False
    root: int = -1

    @classmethod
    def of(cls, raised: Raised, *, ending: bool, tested: bool, root: int, thread: bool) -> "Caught":
        """The record of the same exception."""
        same = {one.name: getattr(raised, one.name) for one in fields(Raised)}
        return cls(**same | {"thread": thread}, ending=ending, tested=tested, root=root)

    def raised(self) -> Raised:
        """The record that a detector reads."""
        return Raised(**{one.name: getattr(self, one.name) for one in fields(Raised)} | {"caught": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Numbers that the workload reports for a finished training step (loss, grad_norm, reward, step_time in seconds…).

    Non-finite numbers are left out of ``values`` and their names listed in ``nonfinite``; ``spelled`` says which of ``nan``, ``inf``
    and ``-inf`` they are, where that was written down.
    """

    n: int
    step: int
    values: Mapping[str, float]
    nonfinite: list[str] = field(default_factory=list)
    spelled: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLogProbs:
    """Token log-probabilities of the policy on the fixed probe batch after a step; None where one is not finite.

    ``untrained`` marks the probe before the first step of a stage that has built its own model.
    """

    n: int
    step: int
    values: list[float | None]
    untrained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """State of a correction: ``installed`` with proof, or ``reason`` why not; counters at the time of the record."""

    n: int
    id: str
    target: str
    installed: bool
    reason: str = ""
    proof: str = ""
    hits: int = 0
    rescued: int = 0
    clamped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition of the whole process was switched from outside, and that made a difference ``effects`` times so far.

    ``reason`` says why it made none.
    """

    n: int
    id: str
    effects: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """A gradient scaler finished a step of the ``optimizer`` with this number; they are counted as they are first stepped."""

    n: int
    step: int
    scale: float
    found_inf: bool
    skipped: bool
    optimizer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a specialised instrument saw, as it stands on disk: ``kind`` says what it is, ``values`` holds its fields.

    A reader makes an :class:`Observed` of every kind in :mod:`dtypedoctor.trace.records`, and keeps other kinds as they are.
    """

    n: int
    step: int
    call: int
    phase: str
    kind: str
    values: Mapping[str, Json]
    fqn: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Generic[What_co]):
    """What a specialised instrument saw, and when.

    ``what`` is one of the records of :mod:`dtypedoctor.trace.records`, ``fqn`` the module that it is about.
    """

    n: int
    step: int
    call: int
    phase: str
    what: What_co
    fqn: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotWatched:
    """Something the watch did not see into, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Became:
    """The process is about to become another program (``os.execv``); it has not where other records follow."""

    program: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """The process has ended another one by a signal, as a pool does with workers that it needs no more."""

    process: int


@dataclass(slots=True, kw_only=True)
class Coverage:
    """How many things ran, and how many of them were measured; the one record that is not frozen.

    Instruments count it up, the first number when they see something and the second when they measure it; it is written once when they stop.

    Attributes:
        module_calls: module calls that ended with a result in steps that are measured; those whose result holds no float are left out.
        operators: operators that ran outside of module calls.
        gradients: gradients of parameters.
        losses: tensors that a backward pass was started from, and other losses that were noticed.
        module_calls_skipped: further module calls, which ended when it was not their turn: a budget says so.
        gradients_skipped: further gradients of parameters, in the same way.
        compiled_outside: calls of compiled functions outside of module calls; modules that they call are none of ``module_calls``.
    """

    module_calls: int = 0
    module_calls_measured: int = 0
    module_calls_skipped: int = 0
    operators: int = 0
    operators_measured: int = 0
    gradients: int = 0
    gradients_measured: int = 0
    gradients_skipped: int = 0
    losses: int = 0
    losses_measured: int = 0
    compiled_outside: int = 0


NOTHING_WATCHED = "the whole script"
"""What is not watched where the watch itself has failed."""
NOT_HERE = "only the process that runs the script is watched"
"""Why other processes are not watched."""
WORKED_ELSEWHERE = "what they compute is not measured: only the process that runs the script is watched"
"""``why`` of other processes that may do, or have done, the work of the script: it is not healthy as long as that is not known."""
NO_TORCH = "the script has not imported torch"
"""Why nothing at all could be watched in this process."""
NO_PYTHON = "no Python process that takes PYTHONPATH from the command was started"
"""Why no process of a command could be watched."""
REPLAY_OF_FAILURES = "replay of what fails"
"""What is not watched where a failing call cannot be made again."""
COMPILED_OUTSIDE = "the inside of compiled functions that were called outside of modules"
"""What is not watched where a program compiles its own functions: an optimizer's step, it may be."""
NOT_SEEN = "not seen:"
"""How ``why`` begins of something whose precision was not checked although it matters for a verdict: it says so beside *healthy*."""
FAILED_THERE = "dtypedoctor failed there"
"""How the reason begins where a part of the watch has failed."""
END_OF_PROGRAM = "the end of the program"
"""What is not watched where the readings of the last work fail: a GPU runs behind the host, and may have stopped after the host was through."""
OFFLOADED = "{name} is on the meta device between the calls of its module, which load it (accelerate's offload)"
"""Why a module's weights can neither be kept nor changed; followed by what to do."""
LOST_UPDATES = "updates that rounding loses, of "
"""How it begins where an optimizer is not checked for them; its name follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the run took: ``peak_memory`` bytes over the baseline before the model was built, ``seconds`` of wall clock."""

    seconds: float
    peak_memory: int
    device: str
    checksum: str | None = None
    """SHA-256 over the bytes of the trainable parameters at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The worker cannot do what the scenario asks (a user's mistake, not a failure of the run)."""

    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Last record. A trace without it was cut short."""

    n: int
    outcome: str
    """``completed`` or ``raised``."""
    steps_completed: int
    details: int = 0
    """Number of the last file of details (:mod:`dtypedoctor.trace.reader`); 0 where there is none."""


class Stopped(NamedTuple):
    """The recording stopped before the process did: the number of the system's error, and the records that were not written."""

    errno: int
    lost: int


KINDS: dict[str, type[Any]] = {
    "header": Header,
    "environment": Environment,
    "stage": Stage,
    "root": Root,
    "parameter": ParameterNote,
    "site": Site,
    "flow": Flow,
    "op": Op,
    "replay": Replay,
    "raised": Raised,
    "caught": Caught,
    "metric": Metric,
    "logprobs": ProbeLogProbs,
    "correction": Correction,
    "condition": Condition,
    "scaler": ScalerState,
    "observation": Observation,
    "not-watched": NotWatched,
    "became": Became,
    "killed": Killed,
    "coverage": Coverage,
    "resources": Resources,
    "refused": Refused,
    "end": End,
}
"""Name on disk of each record that is written as an object."""

NAMES: dict[type[Any], str] = {cls: name for name, cls in KINDS.items()}
