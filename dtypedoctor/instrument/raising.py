"""Exceptions that somebody may catch, recorded where they are raised: nothing that reaches the top tells of them."""

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType, TracebackType

from dtypedoctor.instrument.frames import raising_operator
from dtypedoctor.instrument.session import Session
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.trace.events import Caught, Raised

__all__ = ["CaughtLog", "behind", "raised_record"]

MAX_FRAMES = 40
MAX_PLACES = 100
MAX_TIMES = 10
"""Different places that are recorded, and how often each."""
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, MemoryError)
"""Exceptions with which a program or a library controls itself, and no failure of torch's."""
_RUNNERS = ("/_pytest/runner.py", "/unittest/case.py")
"""Files on the stack of whatever a test calls."""


def raised_record(error: BaseException, session: Session, modules: list[str], phase: str) -> Raised:
    """The record of an exception.

    Args:
        error: was raised.
        session: tells the moment.
        modules: dotted names of the module calls that were open, outermost first.
        phase: in which it was raised.
    """
    return Raised(
        n=session.writer.next_n(),
        step=session.position.step,
        call=session.position.call,
        phase=phase,
        type=type(error).__name__,
        message=message_of(error),
        frames=_frames(error.__traceback__),
        modules=modules,
        op=raising_operator(error),
    )


class CaughtLog:
    """Records exceptions where they are raised, at each place a few times."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._times: Counter[tuple[object, ...]] = Counter()
        self._last: tuple[int, int, tuple[object, ...]] = (0, 0, ())

    def note(
        self,
        error: BaseException,
        modules: list[str],
        phase: str,
        *,
        root: int = -1,
        ending: bool = False,
        fresh: bool = False,
    ) -> None:
        """Records an exception; the same one is recorded once, however many calls it leaves.

        Args:
            error: was raised.
            modules: dotted names of the module calls that were open, outermost first.
            phase: in which it was raised.
            root: number of the outermost module; -1 outside of all.
            ending: whether the program is about to end because of it.
            fresh: whether it has just been raised, so that it cannot be one that was recorded before.
        """
        if not isinstance(error, Exception) or isinstance(error, _CONTROL_FLOW):
            return
        place = (*_place(error), ending)
        last = (id(error), self._session.position.call, place)  # an address is soon another exception's
        if (last == self._last and not fresh) or self._times[place] >= MAX_TIMES:
            return
        if place not in self._times and len(self._times) >= MAX_PLACES:
            return
        self._last = last
        self._times[place] += 1
        found = raised_record(error, self._session, modules, phase)
        found = replace(found, frames=[*_around(error.__traceback__), *found.frames][-MAX_FRAMES:])
        tested = any(path.endswith(_RUNNERS) for path in _files(sys._getframe()))
        self._session.writer.write(Caught.of(found, ending=ending, tested=tested, root=root))


def behind(error: BaseException | None) -> Iterator[BaseException]:
    """The exceptions that ``error`` was raised from, or while handling, the nearest first."""
    seen = {id(error)}
    while error is not None:
        error = error.__cause__ if error.__suppress_context__ else error.__context__
        if error is None or id(error) in seen:
            return
        seen.add(id(error))
        yield error


def _place(error: BaseException) -> tuple[object, ...]:
    """Equal for two exceptions of one type from the same line; who looks on there makes no difference."""
    last: tuple[object, ...] = ()
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("dtypedoctor.instrument"):
            break
        if "/torch/_dynamo/" not in frame.f_code.co_filename:  # around a mode of ours once the compiler is there
            last = (frame.f_code.co_filename, line)
    return type(error), *(last or _around(error.__traceback__)[-1:])


def _is_onlooker(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith("dtypedoctor.")


def _around(found: TracebackType | None) -> list[str]:
    """The frames that an exception has not left yet, outermost first, without those that start a program."""
    frame = found.tb_frame.f_back if found is not None else None
    around: list[str] = []
    while frame is not None and len(around) < MAX_FRAMES:
        if not _is_onlooker(frame) and not frame.f_code.co_filename.startswith("<frozen"):
            around.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return around[::-1]


def _frames(found: TracebackType | None) -> list[str]:
    frames = [f"{f.f_code.co_filename}:{line} {f.f_code.co_name}" for f, line in traceback.walk_tb(found)]
    return frames[-MAX_FRAMES:]


def _files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back
