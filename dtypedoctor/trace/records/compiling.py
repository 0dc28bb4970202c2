"""What torch.compile did, and on which CUDA streams kernels were launched."""

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["CompileCounts", "EagerCall", "GraphBreak", "RecompileLimit", "Recompiled", "StreamLaunches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCounts:
    """How often Dynamo did what; one record for a run in which it did anything."""

    KIND: ClassVar[str] = "compile"

    breaks: int
    unique_graphs: int
    frames: int
    frames_compiled: int
    recompiles: int
    limit_hits: int


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
