"""Reads Python's own stack: which line of whose code is at work, and inside which custom autograd function."""

from types import FrameType

from torch._ops import OpOverload
from torch.autograd.function import FunctionCtx

_NOT_THE_USERS = ("torch.", "dtypedoctor.instrument", "dtypedoctor.worker")
_PASSING_ON = frozenset({"__torch_function__", "__torch_dispatch__"})
"""Methods by which a subclass of tensors hands on what somebody else computes with it."""


def source_of(frame: FrameType | None) -> str | None:
    """``package/file.py:line`` of the innermost frame that is neither torch's nor the doctor's; None where there is none.

    What a subclass of tensors only hands on is the line's that asked for it.

    The path begins at the top of the package that the code belongs to; of a script it is the file's name.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        whose = module != "torch" and not module.startswith(_NOT_THE_USERS)
        if whose and frame.f_code.co_name not in _PASSING_ON:
            return f"{_from_package(frame.f_code.co_filename, module)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _from_package(path: str, module: str) -> str:
    """The end of ``path`` that stands for the dotted name ``module``: one part each, one more for a package's ``__init__``."""
    parts = path.split("/")
    depth = len(module.split(".")) + (parts[-1] == "__init__.py")
    return "/".join(part for part in parts[-depth:] if part)


def raising_operator(error: BaseException) -> str | None:
    """The operator that raised ``error``, e.g. ``aten.mm.default``; None where its kernel was called without a Python frame."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    called = innermost.tb_frame.f_locals.get("self") if innermost is not None else None
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
    value = frame.f_locals.get(names[0]) if names else None
    if isinstance(value, tuple):
        value = value[0] if value else None
    return value if isinstance(value, FunctionCtx) else None


def function_name(context: FunctionCtx) -> str:
    """Name of the custom function that ``context`` belongs to."""
    return type(context).__name__.removesuffix("Backward")
