"""Tells what broke in from what the running code itself raised.

Python runs a signal handler between two instructions of whatever runs at that moment, and raises there what the handler raises;
an exception that one thread sends to another (``PyThreadState_SetAsyncExc``) arrives the same way. Such an interruption means
the program, so code that keeps its own errors to itself (:class:`contained`) must let it pass.
"""

import sys
from collections.abc import Callable
from dis import opname
from queue import Empty
from signal import SIGINT, Signals
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

_TRACE_EVENTS = frozenset({"call", "line", "return", "exception", "opcode"})
_RAISES = frozenset({"RAISE_VARARGS", "RERAISE"})
_ONLY_CHECKS = ("RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
"""Instructions that raise nothing themselves, at which the interpreter looks for signals and exceptions of other threads."""
_RAISED_BARE = (MemoryError, StopIteration, StopAsyncIteration, Empty)
"""What functions written in C raise without an argument."""
_KNOWN = sys.stdlib_module_names | {"torch", "numpy", "triton", "dtypedoctor"}
"""Packages whose C code may raise classes of their own."""
_VARARGS = 0x04


HEARD: list[int] = []
"""Numbers of the signals by which this process was asked to end. A library may make an error of its own of the exception: pydantic
says that it cannot build a validator, which is no defect."""


def interrupt(number: int, _: FrameType | None) -> NoReturn:
    """A signal handler: raises what Ctrl-C raises, and keeps in :data:`HEARD` that it has.

    Raises:
        KeyboardInterrupt: always; it names every signal but that of Ctrl-C.
    """
    HEARD.append(number)
    raise KeyboardInterrupt("interrupted" if number == SIGINT else f"interrupted by {Signals(number).name}")


def is_interruption(error: BaseException) -> bool:
    """Whether ``error`` came from outside of the code that was running, by the traceback that it has where it is caught.

    True for every exception that is no ``Exception``, for what a signal handler or a trace function raised, and for an exception
    that another thread has sent. False for what the code itself raised, or whatever it called.
    """
    if not isinstance(error, Exception):
        return True
    inner = error.__traceback__
    while inner is not None:
        outer, inner = inner, inner.tb_next
        if inner is None:
            # whether another thread sent the exception: no instruction raised it, or it has no argument and no ``raise`` made it
            code = outer.tb_frame.f_code.co_code
            at = opname[code[outer.tb_lasti]] if 0 <= outer.tb_lasti < len(code) else ""
            if at in _RAISES:
                return False
            if at.startswith(_ONLY_CHECKS):
                return not isinstance(error, MemoryError)
            if error.args == () and not isinstance(error, _RAISED_BARE):
                return True
            return type(error).__module__.partition(".")[0] not in _KNOWN
        if _breaks_in(inner.tb_frame, outer.tb_frame):
            return True
    return False


class contained:  # noqa: N801  (used as a function is: `with contained() as ours`)
    """Keeps exceptions of the ``with`` block inside, but for interruptions.

    Args:
        failed: called with the exception.

    Attributes:
        error: the exception that was kept inside; None where there was none, or where ``failed`` has got it.
    """

    __slots__ = ("_failed", "error")

    def __init__(self, failed: Callable[[Exception], None] | None = None) -> None:
        self._failed = failed
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or is_interruption(error):
            return False
        if self._failed is None:
            self.error = error
        else:
            self._failed(error)  # not held: a block that is entered often would hold the frames of the program with it
        return True


class noticing:  # noqa: N801  (used as a function is)
    """Calls a function with the exception that leaves the ``with`` block; the exception goes on as it is.

    Args:
        notice: called with the exception.
        only: the class of exceptions that it is called with.
    """

    __slots__ = ("_notice", "_only")

    def __init__(self, notice: Callable[[Any], object], only: type[BaseException] = BaseException) -> None:
        self._notice = notice
        self._only = only

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, self._only):
            self._notice(error)


def say(text: str, *, end: str = "\n") -> None:
    """Writes a line to standard error, whatever that is now; where it cannot be written, nobody is told.

    Lines quote arguments and names of files, whose escape sequences would reach the terminal: what does not print is written as an escape.
    """
    with contained():
        shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
        stream = sys.stderr
        stream.write(shown + end)
        stream.flush()


def _breaks_in(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether ``frame`` is a signal handler ``(number, frame)`` or a trace function ``(frame, event, value)`` of ``interrupted``."""
    # what a Python function was called with, as far as its variables still hold it
    code, variables = frame.f_code, frame.f_locals
    named = code.co_argcount + code.co_kwonlyargcount
    values = [variables.get(name) for name in code.co_varnames[:named]]
    if code.co_flags & _VARARGS:
        values += variables.get(code.co_varnames[named]) or ()
    for before, value, after in zip([None, *values], values, [*values[1:], None], strict=False):
        if value is interrupted and (isinstance(before, int) or (isinstance(after, str) and after in _TRACE_EVENTS)):
            return True
    return False
