"""What all instruments of one process share: the position in the program, where records go, the names, the autocast regions, and the guard
that hides the instruments' own errors from the program, and nothing else.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import is_grad_enabled, nn
from torch.amp.autocast_mode import autocast
from torch.compiler import is_compiling
from torch.cuda.amp import common as amp
from torch.optim import Optimizer

from dtypedoctor._torch_private import (
    CALL_CODE,
    FOLLOWED_CODE,
    DisableTensorClasses,
    DisableTorchFunction,
    call_is_replaced,
    function_mode_is_on,
    is_followed,
    record_operators,
    region_is_on,
    set_grad_enabled,
    tell_dispatcher_of_modes,
    without_autocast,
)
from dtypedoctor.instrument.budget import Readings
from dtypedoctor.instrument.frames import Line, line_of, local_of
from dtypedoctor.instrument.naming import Names, short_name
from dtypedoctor.instrument.statistics import out_of_their_sight
from dtypedoctor.interruptions import contained, is_interruption
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.events import AFTER_STEP, FAILED_THERE, Coverage, NotWatched, Observed
from dtypedoctor.trace.records.execution import AutocastRegion

if TYPE_CHECKING:
    from dtypedoctor.trace.writer import TraceWriter

DEEP = 24
"""Open module calls up to which no program comes near the limit."""
HOOK = 80
"""Frames that a hook takes at most."""


class Room:
    """Raises the recursion limit by the frames that are there because of us.

    torch calls a module by one more function where any hook is registered, and a hook calls functions itself: one of ours that is left without frames
    could neither measure nor say so.

    Attributes:
        added: by how much the limit is raised now.
    """

    __slots__ = ("_limit", "added")

    def __init__(self) -> None:
        self._limit = 0
        self.added = 0

    def make(self, calls: int, frames: int = 0) -> None:
        """Raises the limit by one frame for each of so many open module calls, and by ``frames``; not at all where there are few."""
        limit = sys.getrecursionlimit()
        base = limit - self.added if limit == self._limit else limit  # the program may have set it
        added = calls + frames if calls > DEEP else 0
        with suppress(RecursionError):  # lower than where we are; it is lowered later
            sys.setrecursionlimit(base + added)
            self._limit, self.added = base + added, added


FOR_GOOD = 1 << 30
"""``muted`` of a process in which nothing is ever recorded again."""


class Here:
    """What one thread of the program is doing.

    Attributes:
        thread: identity of the thread that has begun the outermost call which is open.
        call, stack, backward_depth, overrides, muted: as :class:`Position` says.
        began: step in which the last outermost call or backward pass began.
    """

    __slots__ = ("backward_depth", "began", "call", "muted", "overrides", "stack", "thread")

    def __init__(self) -> None:
        self.began = 0
        self.thread = 0
        self.call = 0
        self.stack: list[nn.Module] = []
        self.backward_depth = 0
        self.overrides: list[str] = []
        self.muted = 0

    @property
    def phase(self) -> str:
        """The phase of a module call or op that happens now."""
        if self.overrides:
            return self.overrides[-1]
        if self.backward_depth:
            return "recompute" if self.stack else "backward"
        return "forward"


class _OfThread(threading.local):
    """``here`` of the thread that asks; None in one that Python has not started."""

    def __init__(self) -> None:
        self.here = None if is_foreign() else Here()


_starting = threading.local()


def begin_thread() -> None:
    """Python is about to start this thread, and has not entered it among its own yet."""
    _starting.now = True


def is_foreign() -> bool:
    """Whether Python has not started the thread that asks: autograd has some of its own."""
    thread = threading._active.get(get_ident())  # type: ignore[attr-defined]  # current_thread() would make an entry
    return (thread is None or isinstance(thread, threading._DummyThread)) and not hasattr(_starting, "now")


class Position:
    """Mutable coordinates, shared by all instruments of one process. All but the step belong to the thread that asks for them.

    Attributes:
        step: training step being worked on, from 1.
        looks: whether everything is measured now; see :mod:`dtypedoctor.instrument.budget`.
        call: number of the outermost module call being worked on, from 1 (0 before the thread's first).
        stack: the module calls that are open, outermost first.
        backward_depth: how many backward passes are running (more than one only when nested).
        overrides: phases set by enclosing wrappers (``generate``, ``optimizer``, ``probe``), innermost last.
        muted: while positive, nothing is recorded (the doctor's own work).
        silenced: nothing is ever recorded again in this process.
        silent_work: called when a module or a backward pass runs all the same.
        of, last: where :attr:`here` is found; hooks that every module call runs read them themselves, because a property is a call.
    """

    __slots__ = ("_calls", "last", "looks", "of", "silenced", "silent_work", "step")

    def __init__(self, step: int = 1, call: int = 0) -> None:
        self.step = step
        self.looks = True
        self.of = _OfThread()
        self.last = self.of.here or Here()
        self.last.call = call
        self._calls = count(call + 1)
        self.silenced = False
        self.silent_work: Callable[[], None] = lambda: None

    @property
    def here(self) -> Here:
        """What the thread that asks is doing. One that Python has not started, as those of autograd on CUDA, works for the thread whose
        backward pass began last, and which waits for it."""
        return self.of.here or self.last

    def begin_call(self, skipped: int = 0) -> None:
        """An outermost call begins in this thread, after ``skipped`` that were not told of; no other one gets its number."""
        here = self.of.here or self.last
        here.call = next(islice(self._calls, skipped, None)) if skipped else next(self._calls)
        here.began = self.step

    @property
    def call(self) -> int:
        """Number of the outermost module call being worked on."""
        return (self.of.here or self.last).call

    @property
    def stack(self) -> list[nn.Module]:
        """The module calls that are open."""
        return (self.of.here or self.last).stack

    @property
    def overrides(self) -> list[str]:
        """Phases set by enclosing wrappers."""
        return (self.of.here or self.last).overrides

    @property
    def backward_depth(self) -> int:
        """How many backward passes are running."""
        return (self.of.here or self.last).backward_depth

    @backward_depth.setter
    def backward_depth(self, depth: int) -> None:
        self.last = here = self.here
        here.backward_depth, here.began = depth, self.step

    @property
    def muted(self) -> int:
        """Whether nothing is recorded."""
        return FOR_GOOD if self.silenced else self.here.muted

    @muted.setter
    def muted(self, depth: int) -> None:
        if depth >= FOR_GOOD:
            self.silenced = True
        else:
            self.here.muted = depth

    @property
    def phase(self) -> str:
        """The phase of a module call or op that happens now."""
        return self.here.phase

    @property
    def moment(self) -> tuple[int, int, str]:
        """Step, call and phase that are told of what happens now: behind an optimizer's step, nobody knows yet whether it ends an iteration or begins one."""
        here = self.here
        if here.phase == "forward" and here.call and not here.stack and here.began < self.step:
            return self.step - 1, here.call, AFTER_STEP
        return self.step, here.call, here.phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Marks everything inside as belonging to ``phase``."""
        overrides = self.overrides
        open_before = len(overrides)
        try:
            overrides.append(phase)
            yield
        finally:
            del overrides[open_before:]

    def mute(self) -> "Muted":
        """Nothing inside is recorded."""
        return Muted(self)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The doctor's own work inside: it is recorded by nobody, seen by no mode of the program, and has neither gradients nor autocast."""
        with self.mute(), out_of_their_sight(), without_autocast(), torch.no_grad():
            yield

    def unmute(self) -> None:
        """Records again after an interruption, whatever was muted when it came."""
        self.here.muted = 0


class Muted:
    """Mutes a position in a ``with`` block, for this thread.

    An interruption may come at the beginning of any function, so also of ``__exit__``: :meth:`Position.unmute` puts that right.
    """

    __slots__ = ("_here",)

    def __init__(self, position: Position) -> None:
        self._here = position.here

    def __enter__(self) -> None:
        self._here.muted += 1

    def __exit__(self, *_: object) -> None:
        if self._here.muted:
            self._here.muted -= 1


_STEP: CodeType = Optimizer.profile_hook_step(lambda self: None).__code__


def forget_ended_calls(stack: list[nn.Module], thread: int) -> None:
    """Removes the calls that are over from ``stack``, where the hook that is told of the beginning of a call runs.

    Args:
        stack: modules whose calls have begun, outermost first.
        thread: the thread that they were called in.
    """
    if call_is_replaced():
        return  # somebody has put a function of their own there
    here = thread == get_ident()
    # Usually the last on the stack is the call around the one that begins: to count all would cost a deep recursion the square of its depth.
    if here and next((module for _, module in islice(_calls_on(sys._getframe()), 1, None)), None) is stack[-1]:
        return
    # Of a module that is compiled in place, torch's own frame comes later than ours, or not at all.
    calls = _calls_on(sys._current_frames().get(thread))
    running = sum(code is FOLLOWED_CODE or not is_followed(module) for code, module in calls)
    del stack[max(0, running - here) :]


def calls_left_by(error: BaseException) -> tuple[list[nn.Module], Any]:
    """The modules whose calls an exception has left that is on its way through the outermost of them, and the positional arguments of the innermost."""
    trace, modules, args = error.__traceback__, [], ()
    while trace is not None:
        if trace.tb_frame.f_code is CALL_CODE or trace.tb_frame.f_code is FOLLOWED_CODE:
            modules.append(local_of(trace.tb_frame, "self"))
            args = local_of(trace.tb_frame, "args")
        trace = trace.tb_next
    return modules, args


def calls_running() -> list[nn.Module]:
    """The modules whose calls are running in this thread, outermost first."""
    return [module for _, module in _calls_on(sys._getframe())][::-1]


def _calls_on(frame: FrameType | None) -> Iterator[tuple[CodeType, nn.Module]]:
    """The module calls that ``frame`` is inside of, innermost first, each with the code that makes it: torch's or ours."""
    while frame is not None:
        if frame.f_code is CALL_CODE or frame.f_code is FOLLOWED_CODE:
            yield frame.f_code, local_of(frame, "self")
        frame = frame.f_back


def steps_running() -> int:
    """How many steps of optimizers, each inside of the one before, are running in this thread."""
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code is _STEP
        frame = frame.f_back
    return count


class _RegionsOfThread(threading.local):
    """The regions that are open in each thread that Python has started; in those of autograd the ones of the first thread."""

    def __init__(self, first: list[AutocastRegion]) -> None:
        self.regions = first if is_foreign() else []


MAX_KNOWN = 256
"""Different regions of which the description is kept."""


class AutocastLog:
    """Follows autocast regions in forward and backward, and knows the innermost one per device type, while started.

    Below the dispatcher ``torch.is_autocast_enabled()`` always answers False, so the regions are followed where they are
    entered: the context manager class itself, which ``custom_bwd`` also uses to restore the forward's state.

    Attributes:
        entered: called with each region that is entered; between looks with those that are unlike all before.
        outermost: how many regions were entered outside of all others.
        of: ``of.regions`` are those that are open in the thread that asks, outermost first.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        first: list[AutocastRegion] = []
        self.of = _RegionsOfThread(first)
        self.of.regions = first
        self._lacking: WeakSet[autocast] = WeakSet()
        """Regions that torch has switched off, for lack of their device."""
        self._undo: list[Callable[[], None]] = []
        self.entered: list[Callable[[AutocastRegion], None]] = []
        self.outermost = 0
        self._known: dict[tuple[Any, ...], tuple[AutocastRegion, Line | None]] = {}
        self._left: tuple[int, tuple[AutocastRegion, ...]] = (0, ())
        """Identity of the exception that has left a region last, and the regions that were open where it was raised."""

    def start(self) -> None:
        """Begins to follow regions; of those already open, the innermost of each device type is known."""
        self.of.regions[:] = list(_already_open())
        enter, leave, not_available = autocast.__enter__, autocast.__exit__, amp.amp_definitely_not_available

        def amp_definitely_not_available() -> bool:
            """torch asks for a region that is asked to cast. A wrapper of the region's own constructor would be what its warning names."""
            lacks = not_available()
            region = local_of(sys._getframe(1), "self")
            if lacks and isinstance(region, autocast):
                self._lacking.add(region)
            return lacks

        def __enter__(region: autocast) -> Any:  # noqa: N807
            result = enter(region)
            if not is_compiling():
                self._note(region)
            return result

        def __exit__(  # noqa: N807
            region: autocast, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
        ) -> Any:
            regions = self.of.regions
            if regions and not is_compiling():
                if error is not None and self._left[0] != id(error):
                    self._left = (id(error), tuple(regions))
                regions.pop()
            return leave(region, kind, error, tb)

        amp.amp_definitely_not_available = amp_definitely_not_available
        autocast.__enter__ = __enter__  # type: ignore[method-assign]
        autocast.__exit__ = __exit__  # type: ignore[method-assign]

        def undo() -> None:
            amp.amp_definitely_not_available = not_available
            autocast.__enter__ = enter  # type: ignore[method-assign]
            autocast.__exit__ = leave  # type: ignore[method-assign]

        self._undo += [undo, _keep_modes_after_inference()]

    def stop(self) -> None:
        """Puts the context managers back as they were."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Inside, nobody hears of regions that are entered; afterwards those are open that were before."""
        listeners, regions = self.entered, list(self.of.regions)
        self.entered = []
        try:
            yield
        finally:
            self.entered = listeners
            self.of.regions[:] = regions

    def open_again(self, regions: Sequence[AutocastRegion]) -> None:
        """Takes ``regions`` for those that are open, outermost first."""
        self.of.regions[:] = regions

    def left_by(self, error: BaseException) -> tuple[AutocastRegion, ...]:
        """The regions that were open where ``error`` was raised, outermost first."""
        return self._left[1] if self._left[0] == id(error) else self.open_regions

    def _note(self, region: autocast) -> None:
        """A region is entered: what was made of one like it at the same line is taken again, for each step enters those of the step before."""
        line, enabled = line_of(sys._getframe(2)), region_is_on(region)
        off = not enabled and region not in self._lacking
        key = (region.device, region.fast_dtype, enabled, off, line and (id(line.code), line.number))
        known, regions = self._known.get(key), self.of.regions
        if is_new := known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            wanted, source = short_name(region.fast_dtype), line and line.source
            noted = AutocastRegion(device=region.device, wanted=wanted, enabled=enabled, off=off, source=source)
            known = self._known[key] = (noted, line)  # keeps the code, whose identity no other may have then
        self.outermost += not regions
        regions.append(known[0])
        for listener in self.entered if is_new or self._position.looks else ():
            listener(known[0])

    def dtype(self, device: str) -> str | None:
        """The autocast dtype in force for ``device`` (``cpu``, ``cuda``), or None."""
        regions = self.of.regions
        if not regions:
            return None
        return next((region.dtype for region in reversed(regions) if region.device == device), None)

    @property
    def open_regions(self) -> tuple[AutocastRegion, ...]:
        """Every region that is open, outermost first."""
        return tuple(self.of.regions)


def _keep_modes_after_inference() -> Callable[[], None]:
    """Lets a mode that is put on or taken off inside of inference mode be so afterwards, too; returns what ends that.

    Inference mode leaves the dispatcher as it has found it, so that it would ask for a mode that is gone, which raises, or not for one that has come.
    """
    leave = torch.inference_mode.__exit__

    def __exit__(region: torch.inference_mode, *raised: Any) -> None:  # noqa: N807
        leave(region, *raised)
        if not is_compiling():
            tell_dispatcher_of_modes()

    def undo() -> None:
        torch.inference_mode.__exit__ = leave  # type: ignore[method-assign]

    torch.inference_mode.__exit__ = __exit__  # type: ignore[method-assign]
    return undo


def _already_open() -> list[AutocastRegion]:
    return [
        AutocastRegion(device=d, wanted=short_name(torch.get_autocast_dtype(d)), enabled=True, source=None)
        for d in ("cpu", "cuda")
        if torch.is_autocast_enabled(d)
    ]


MAX_TOLD = 50
"""Different things that are reported as not watched; a program can have any number of modules."""


class Guard:
    """Calls instruments so that nothing they raise reaches the program.

    What a signal handler of the program raises while an instrument is at work, or another thread sends, passes unchanged
    (:mod:`dtypedoctor.interruptions`); what was muted for the instrument's own work is not muted any more then, and autograd is
    on or off as it was. A ``with`` block does not see to that: its ``__exit__`` may be what is interrupted.

    Args:
        writer: where what went unwatched is recorded, once each.
        position: nothing is called while it is muted.
    """

    def __init__(self, writer: "TraceWriter", position: Position) -> None:
        self._writer = writer
        self._position = position
        self._room = Room()
        self._told: set[str] = set()
        self._each: dict[str, Callable[..., None]] = {}
        """By what goes unwatched where it fails, what tells listeners one after the other; made once, since each event of a step has some."""
        self.profiled = False
        """Whether a profiler of the program is on: what it counts are the program's operators, not those that measure them."""

    def shield(self, callback: Callable[..., Any], what: str, *, quick: bool = False) -> Callable[..., None]:
        """``callback`` as a hook that returns nothing, raises nothing of its own, and stands still inside compiled code.

        Every way from the program into the instruments leads through here, or through :meth:`keeping`.

        Args:
            callback: the instrument.
            what: what goes unwatched where it fails, in words.
            quick: it sees to it itself that no ``__torch_function__`` of the program is called, where it does not leave tensors of other classes alone.
        """
        position, room = self._position, self._room

        def hook(*args: Any) -> None:
            if is_compiling() or (here := position.of.here or position.last).muted:
                return
            if position.silenced:
                position.silent_work()
                return
            if function_mode_is_on():  # the program's own, which is to see what the program does and nothing else
                with DisableTorchFunction():  # by itself a hook would be a circle, and keep what it is called with
                    self.shield(callback, what, quick=quick)(*args)
                return
            grad = is_grad_enabled()
            if self.profiled:
                record_operators(False)
            if len(here.stack) > DEEP:
                room.make(len(here.stack), HOOK)
            try:
                if quick:
                    callback(*args)
                else:
                    with DisableTensorClasses():
                        callback(*args)
            except BaseException as error:  # a defect of ours must not become the program's; all else is raised again
                position.unmute()
                set_grad_enabled(grad)
                if is_interruption(error):
                    raise
                self.failed(what, error)
            finally:
                if self.profiled:
                    record_operators(True)
                if room.added:
                    room.make(len(here.stack))

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch warns of other hooks when it pickles a tensor
        return hook

    def tell_each(self, listeners: Sequence[Callable[..., Any]], what: str, *facts: Any) -> None:
        """Calls ``listeners`` with ``facts`` behind one shield; one that fails leaves out none of those after it."""
        shielded = self._each.get(what)
        if shielded is None:
            shielded = self._each[what] = self.shield(_tell_waiting, what)
        waiting, left = deque(listeners), -1
        while waiting and len(waiting) != left:  # the same where nobody is told, because all is muted
            left = len(waiting)
            shielded(waiting, facts)

    def keeping(self, what: str) -> contained:
        """A context in which errors of ours are kept from the program: the same as :meth:`shield` for a few lines."""
        return contained(lambda error: self.failed(what, error))

    def failed(self, what: str, error: BaseException) -> None:
        """Records that ``what`` is not watched because of a defect of ours.

        Raises:
            Exception: ``error`` itself, where it is an interruption.
        """
        if is_interruption(error):
            raise error
        with contained() as text:
            message = elided(str(error))[:200]  # runs code of its class, which may be the program's
        self.tell(what, f"{FAILED_THERE} with {type(error).__name__}: {message if not text.error else '?'}")

    def tell(self, what: str, why: str) -> None:
        """Records that ``what`` is not watched."""
        if what in self._told or len(self._told) >= MAX_TOLD:
            return
        self._told.add(what)
        with contained(
            lambda _: self._writer.disown()
        ):  # closed, say: nothing can be recorded, and the program goes on
            self._writer.write(NotWatched(what=what, why=why))


def _tell_waiting(waiting: deque[Callable[..., Any]], facts: tuple[Any, ...]) -> None:
    """Calls listeners, each of which is waiting no more before it is called."""
    while waiting:
        waiting.popleft()(*facts)


MAX_NOTES = 40
"""Observations of one kind that :meth:`Session.once` writes; a defect that is seen everywhere need not be recorded everywhere."""


class Session:
    """The one thing that every instrument of a process is made with.

    Attributes:
        writer: where records go.
        position: step, call and phase of the moment.
        names: dotted names of modules, parameters and buffers.
        autocast: the autocast regions that are open.
        guard: keeps the instruments' own errors from the program.
        coverage: how much of what ran was measured.
        readings: says which tensors outside of modules are read at once.
        is_in_half: whether half precision has been seen at work.
    """

    def __init__(self, writer: "TraceWriter") -> None:
        self.writer = writer
        self.position = Position()
        self.names = Names(writer)
        self.autocast = AutocastLog(self.position)
        self.guard = Guard(writer, self.position)
        self.coverage = Coverage()
        self.readings = Readings(lambda: self.position.step)
        self.is_in_half = False
        self._once: dict[str, set[Any]] = {}
        self.seen_once: Callable[[Any, str | None], None] = lambda record, fqn: None
        """Called with each record of :meth:`once`, and the module that it is about."""

    def emit(
        self, record: Any, *, fqn: str | None = None, phase: str | None = None, at: tuple[int, int] | None = None
    ) -> None:
        """Writes what an instrument has observed, with the coordinates of the moment.

        Args:
            record: one of :mod:`dtypedoctor.trace.records`.
            fqn: dotted name of the module that it is about.
            phase: the phase that it belongs to, where it is not the present one.
            at: step and call that it belongs to, where they are not the present ones.
        """
        here = self.position
        if at is None and phase is None:
            step, call, phase = here.moment
        else:
            step, call = at if at is not None else (here.step, here.call)
        n = self.writer.next_n()
        self.writer.write(Observed(n=n, step=step, call=call, phase=phase or here.phase, what=record, fqn=fqn))

    def once(self, record: Any, key: Any, fqn: str | None = None, **when: Any) -> None:
        """Does the same unless a record of this kind and ``key`` has been written, or :data:`MAX_NOTES` of this kind."""
        written = self._once.setdefault(record.KIND, set())
        if key not in written and len(written) < MAX_NOTES:
            written.add(key)
            self.emit(record, fqn=fqn, **when)
            self.seen_once(record, fqn)
