"""Takes the doctor's own frames out of tracebacks, so that a script's errors look as they do without it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

HOME = str(Path(__file__).resolve().parents[1])


def hide_own_frames(error: BaseException) -> None:
    """Removes this package's frames, and torch's that are there because of it, from the traceback of ``error`` and of the exceptions
    that it came from."""
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
    """A traceback without this package's frames, and without those of torch that are there because of it.

    Around an operator these are the wrapper that keeps the compiler out of a dispatch mode, and the operator that the mode calls; around a
    module the function in which torch calls hooks, if there are no others than the watch's.
    """
    kept: list[TracebackType] = []
    behind_own = False
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(HOME):
            while kept and _is(kept[-1], _UNCOMPILED):
                kept.pop()
            behind_own = True
        elif not (behind_own and _is(traceback, _OPERATOR)):
            behind_own = False
            if _is(traceback, _WITH_HOOKS) and kept and not _has_other_hooks(kept[-1]):
                kept[-1] = _without_hooks(kept[-1])
            else:
                kept.append(traceback)
        traceback = traceback.tb_next
    following = None
    for frame in reversed(kept):
        frame.tb_next = following
        following = frame
    return following


_UNCOMPILED = ("torch/_dynamo/eval_frame.py", "_fn")
_OPERATOR = ("torch/_ops.py", "__call__")
_WITH_HOOKS = ("torch/nn/modules/module.py", "inner")
_MODULES = "torch.nn.modules.module"
_TABLES = ("_backward_pre_hooks", "_backward_hooks", "_forward_pre_hooks", "_forward_hooks")


def _is(traceback: TracebackType, function: tuple[str, str]) -> bool:
    code = traceback.tb_frame.f_code
    return code.co_name == function[1] and code.co_filename.endswith(function[0])


def _has_other_hooks(calling: TracebackType) -> bool:
    """Whether torch would have called hooks of the program in this frame, which calls a module."""
    module, modules = calling.tb_frame.f_locals.get("self"), sys.modules.get(_MODULES)
    hooks = [hook for name in _TABLES for hook in getattr(modules, f"_global{name}", {}).values()]
    if not all(map(_is_own, hooks)):
        return True
    return any(getattr(module, name, None) for name in _TABLES)


def _is_own(hook: object) -> bool:
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename.startswith(HOME)


def _without_hooks(calling: TracebackType) -> TracebackType:
    """The frame that calls a module as it is where there are no hooks: its first call with all arguments is that of ``forward``."""
    import dis  # not before torch has brought it in: a script sees which modules there are

    for instruction in dis.get_instructions(calling.tb_frame.f_code):
        if instruction.opname == "CALL_FUNCTION_EX" and instruction.positions is not None:
            line = instruction.positions.lineno or calling.tb_lineno
            return TracebackType(None, calling.tb_frame, instruction.offset, line)
    return calling
