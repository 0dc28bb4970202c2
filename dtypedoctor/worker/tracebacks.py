"""Takes the doctor's own frames out of tracebacks, so that a script's errors look as they do without it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

HOME = str(Path(__file__).resolve().parents[1])


def hide_own_frames(error: BaseException) -> None:
    """Removes this package's frames from the traceback of ``error`` and of the exceptions that it came from."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _foreign(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def hide_in_excepthook() -> Callable[[], None]:
    """Lets whatever ``sys.excepthook`` is now see exceptions without this package's frames; nothing else of them is changed.

    Returns:
        What puts the hook back, unless somebody has set another one since.
    """
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hide_own_frames(error)
        shown(kind, error, error.__traceback__)

    def put_back() -> None:
        if sys.excepthook is hook:
            sys.excepthook = shown

    sys.excepthook = hook
    return put_back


def _foreign(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    kept = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(HOME)]
    following = None
    for frame in reversed(kept):
        frame.tb_next = following
        following = frame
    return following
