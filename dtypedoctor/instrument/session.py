"""What all instruments of one process share: where records go, the position, the names, the autocast regions, and the guard that keeps the
instruments' own errors away from the program that they watch, and nothing else.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.autocast_mode import autocast
from torch.compiler import is_compiling

from dtypedoctor._torch_private import DisableTorchFunction, function_mode_is_on, region_is_on, set_grad_enabled
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.naming import Names, short_name
from dtypedoctor.instrument.position import Position, is_foreign
from dtypedoctor.interruptions import contained, is_interruption
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.events import FAILED_THERE, Coverage, NotWatched, Observed
from dtypedoctor.trace.records.execution import AutocastRegion

if TYPE_CHECKING:
    from dtypedoctor.trace.writer import TraceWriter


class _RegionsOfThread(threading.local):
    """The regions that are open in each thread that Python has started; in those of autograd the ones of the first thread."""

    def __init__(self, first: list[AutocastRegion]) -> None:
        self.regions = first if is_foreign() else []


class AutocastLog:
    """Follows autocast regions in forward and backward, and knows the innermost one per device type, while started.

    Below the dispatcher ``torch.is_autocast_enabled()`` always answers False, so the regions are followed where they are
    entered: the context manager class itself, which ``custom_bwd`` also uses to restore the forward's state.

    Attributes:
        entered: called with each region that is entered.
    """

    def __init__(self) -> None:
        first: list[AutocastRegion] = []
        self._of = _RegionsOfThread(first)
        self._of.regions = first
        self._undo: list[Callable[[], None]] = []
        self.entered: list[Callable[[AutocastRegion], None]] = []

    @property
    def _regions(self) -> list[AutocastRegion]:
        return self._of.regions

    def start(self) -> None:
        """Begins to follow regions; of those already open, the innermost of each device type is known."""
        self._regions[:] = list(_already_open())
        enter, leave = autocast.__enter__, autocast.__exit__

        def __enter__(region: autocast) -> Any:  # noqa: N807
            result = enter(region)
            if not torch.compiler.is_compiling():
                self._note(region)
            return result

        def __exit__(  # noqa: N807
            region: autocast, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
        ) -> Any:
            if self._regions and not torch.compiler.is_compiling():
                self._regions.pop()
            return leave(region, kind, error, tb)

        autocast.__enter__ = __enter__  # type: ignore[method-assign]
        autocast.__exit__ = __exit__  # type: ignore[method-assign]

        def undo() -> None:
            autocast.__enter__ = enter  # type: ignore[method-assign]
            autocast.__exit__ = leave  # type: ignore[method-assign]

        self._undo.append(undo)

    def stop(self) -> None:
        """Puts the context manager back as it was."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Inside, nobody hears of regions that are entered; afterwards those are open that were before."""
        listeners, regions = self.entered, list(self._regions)
        self.entered = []
        try:
            yield
        finally:
            self.entered = listeners
            self._regions[:] = regions

    def open_again(self, regions: Sequence[AutocastRegion]) -> None:
        """Takes ``regions`` for those that are open, outermost first."""
        self._regions[:] = regions

    def _note(self, region: autocast) -> None:
        found = AutocastRegion(
            device=region.device,
            wanted=short_name(region.fast_dtype),
            enabled=region_is_on(region),
            source=source_of(sys._getframe(2)),
        )
        self._regions.append(found)
        for listener in self.entered:
            listener(found)

    def dtype(self, device: str) -> str | None:
        """The autocast dtype in force for ``device`` (``cpu``, ``cuda``), or None."""
        regions = self._of.regions
        if not regions:
            return None
        return next((region.dtype for region in reversed(regions) if region.device == device), None)

    @property
    def open_regions(self) -> tuple[AutocastRegion, ...]:
        """Every region that is open, outermost first."""
        return tuple(self._regions)


def _already_open() -> list[AutocastRegion]:
    return [
        AutocastRegion(device=d, wanted=short_name(torch.get_autocast_dtype(d)), enabled=True, source=None)
        for d in ("cpu", "cuda")
        if torch.is_autocast_enabled(d)
    ]


grad_is_enabled = torch.is_grad_enabled

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
        self._told: set[str] = set()

    def shield(self, callback: Callable[..., Any], what: str) -> Callable[..., None]:
        """``callback`` as a hook that returns nothing, raises nothing of its own, and stands still inside compiled code.

        Every way from the program into the instruments leads through here, or through :meth:`keeping`.

        Args:
            callback: the instrument.
            what: what goes unwatched where it fails, in words.
        """
        position = self._position

        def hook(*args: Any) -> None:
            if is_compiling() or (position.of.here or position.last).muted:
                return
            if position.silenced:
                position.silent_work()
                return
            if function_mode_is_on():  # the program's own, which is to see what the program does and nothing else
                with DisableTorchFunction():
                    hook(*args)
                return
            grad = grad_is_enabled()
            try:
                callback(*args)
            except BaseException as error:  # a defect of ours must not become the program's; all else is raised again
                position.unmute()
                if grad_is_enabled() is not grad:
                    set_grad_enabled(grad)
                if is_interruption(error):
                    raise
                self.failed(what, error)

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch warns of other hooks when it pickles a tensor
        return hook

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
    """

    def __init__(self, writer: "TraceWriter") -> None:
        self.writer = writer
        self.position = Position()
        self.names = Names(writer)
        self.autocast = AutocastLog()
        self.guard = Guard(writer, self.position)
        self.coverage = Coverage()
        self._once: dict[str, set[Any]] = {}

    def emit(self, record: Any, *, fqn: str | None = None, phase: str | None = None) -> None:
        """Writes what an instrument has observed, with the coordinates of the moment.

        Args:
            record: one of :mod:`dtypedoctor.trace.records`.
            fqn: dotted name of the module that it is about.
            phase: the phase that it belongs to, where it is not the present one.
        """
        here = self.position
        phase = phase if phase is not None else here.phase
        n = self.writer.next_n()
        self.writer.write(Observed(n=n, step=here.step, call=here.call, phase=phase, what=record, fqn=fqn))

    def once(self, record: Any, key: Any, fqn: str | None = None) -> None:
        """Does the same unless a record of this kind and ``key`` has been written, or :data:`MAX_NOTES` of this kind."""
        written = self._once.setdefault(record.KIND, set())
        if key not in written and len(written) < MAX_NOTES:
            written.add(key)
            self.emit(record, fqn=fqn)
