"""Python's own stack: which line of whose code is at work, inside which custom autograd function, and exceptions where they are raised,
for nothing that reaches the top tells of one that somebody catches.
"""

import ast
import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from inspect import CO_OPTIMIZED
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.autograd.function import FunctionCtx

from dtypedoctor._torch_private import OpOverload
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.trace.events import Caught, Raised

if TYPE_CHECKING:
    from dtypedoctor.instrument.session import Session


_NOT_THE_USERS = (
    "torch.",
    "dtypedoctor.instrument",
    "dtypedoctor.worker",
    "dtypedoctor.interruptions",
    "dtypedoctor._torch_private",
)
_PASSING_ON = frozenset({"__torch_function__", "__torch_dispatch__"})
"""Methods by which a subclass of tensors hands on what somebody else computes with it."""
_CASTS = frozenset({"float", "half", "bfloat16", "double"})
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", *_CASTS})


def source_of(frame: FrameType | None) -> str | None:
    """``package/file.py:line`` of the innermost frame that is neither torch's nor the doctor's; None where there is none.

    What a subclass of tensors only hands on is the line's that asked for it.

    The path begins at the top of the package that the code belongs to; of a script it is the file's name.
    """
    line = line_of(frame)
    return None if line is None else line.source


class Line(NamedTuple):
    """A line of code. Making one takes a third of a microsecond; its text is put together where it is asked for."""

    code: CodeType
    module: str
    number: int

    @property
    def source(self) -> str:
        """``package/file.py:line``; of a script the file's name."""
        return f"{_from_package(self.code.co_filename, self.module)}:{self.number}"


def line_of(frame: FrameType | None) -> Line | None:
    """The line of the innermost frame that is neither torch's nor the doctor's; None where there is none."""
    frame = _users(frame)
    return None if frame is None else Line(frame.f_code, frame.f_globals.get("__name__", ""), frame.f_lineno)


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        whose = module != "torch" and not module.startswith(_NOT_THE_USERS)
        if whose and frame.f_code.co_name not in _PASSING_ON:
            return frame
        frame = frame.f_back
    return None


def names_a_dtype(frame: FrameType | None) -> bool:
    """Whether the call that is at work in the innermost frame of the user's names a dtype: ``x.half()``, ``x.to(torch.float16)``.

    False where the dtype comes from a variable or from another tensor, and where the source cannot be read.
    """
    frame = _users(frame)
    return frame is not None and _names_a_dtype(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _names_a_dtype(code: CodeType, instruction: int) -> bool:
    called = _expression(code, instruction)
    if not isinstance(called, ast.Call):
        return False
    if isinstance(called.func, ast.Attribute) and called.func.attr in _CASTS:
        return True
    given = [*called.args, *(keyword.value for keyword in called.keywords)]
    named = [node.attr for value in given for node in ast.walk(value) if isinstance(node, ast.Attribute)]
    return not _DTYPES.isdisjoint(named)


def _expression(code: CodeType, instruction: int) -> ast.expr | None:
    """The expression that an instruction belongs to; None where the source cannot be read, or is something else."""
    lines = linecache.getlines(code.co_filename)
    first, last, begin, end = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if not lines or first is None or last is None or begin is None or end is None:
        return None
    chosen = [line.encode() for line in lines[first - 1 : last]]
    chosen[-1] = chosen[-1][:end]
    chosen[0] = chosen[0][begin:]
    try:
        return ast.parse(b"(" + b"".join(chosen) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _from_package(path: str, module: str) -> str:
    """The end of ``path`` that stands for the dotted name ``module``: one part each, one more for a package's ``__init__``."""
    parts = path.split("/")
    depth = len(module.split(".")) + (parts[-1] == "__init__.py")
    return "/".join(part for part in parts[-depth:] if part)


def local_of(frame: FrameType, name: str) -> Any:
    """The local variable ``name`` of a frame at work; None where it has none.

    Before Python 3.13 a frame that is asked for its variables keeps a copy of them until it ends, and with it tensors that
    the program has let go of. The copy is emptied, unless the program itself holds it (it has called ``locals()``).
    """
    held = frame.f_locals
    value = held.get(name)
    own = 3  # references: the frame's, this function's, and that of the argument of getrefcount
    if type(held) is dict and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(held) <= own:
        held.clear()
    return value


def raising_operator(error: BaseException) -> str | None:
    """The operator that raised ``error``, e.g. ``aten.mm.default``; None where its kernel was called without a Python frame."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    called = local_of(innermost.tb_frame, "self") if innermost is not None else None
    return str(called) if isinstance(called, OpOverload) else None


def function_context(frame: FrameType | None) -> FunctionCtx | None:
    """The context of the innermost custom ``autograd.Function`` whose forward is running, if any.

    torch calls a forward from ``Function.apply`` and hands it the context first; a decorator in between (``custom_fwd``)
    takes it as the first of its ``*args``.
    """
    inner: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_globals.get("__name__") == "torch.autograd.function":
            return _first_argument(inner) if inner is not None else None
        inner, frame = frame, frame.f_back
    return None


def _first_argument(frame: FrameType) -> FunctionCtx | None:
    names = frame.f_code.co_varnames
    value = local_of(frame, names[0]) if names else None
    if isinstance(value, tuple):
        value = value[0] if value else None
    return value if isinstance(value, FunctionCtx) else None


def function_name(context: FunctionCtx) -> str:
    """Name of the custom function that ``context`` belongs to."""
    return type(context).__name__.removesuffix("Backward")


MAX_FRAMES = 40
MAX_PLACES = 100
MAX_TIMES = 10
"""Different places that are recorded, and how often each."""
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, MemoryError)
"""Exceptions with which a program or a library controls itself, and no failure of torch's."""
_RUNNERS = ("/_pytest/runner.py", "/unittest/case.py")
"""Files on the stack of whatever a test calls."""


def raised_record(error: BaseException, session: "Session", modules: list[str], phase: str) -> Raised:
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

    def __init__(self, session: "Session") -> None:
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
