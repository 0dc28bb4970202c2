"""The base of the modes that see operators: the compiler stays out of them, and is not loaded for their sake."""

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

COMPILER = "torch._dynamo"

_hidden: set[type] = set()


class OperatorMode(TorchDispatchMode):
    """A dispatch mode whose own code is never compiled.

    torch wraps a mode's ``__torch_dispatch__`` so that Dynamo leaves it alone, and the wrapper imports Dynamo at the first
    operator: more than a second of processor time in a program that compiles nothing. Here the function is wrapped once
    Dynamo has come, which only matters from then on; call :func:`keep_compiler_out` when it comes.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch need not wrap what this class wraps itself."""
        return False

    def __enter__(self) -> Self:
        keep_compiler_out()
        super().__enter__()
        return self

    def leave(self) -> None:
        """Takes the mode off, if it is on and wherever it stands: an exception may have kept it on for longer than its block."""
        if not any(mode is self for mode in _get_current_dispatch_mode_stack()):
            return
        above = []
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_pop_mode())
        try:
            self.__exit__(None, None, None)
        finally:
            for mode in reversed(above):
                _push_mode(mode)

    def taken_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that is made of others by way of these, which this mode sees."""
        with self:
            return func.decompose(*args, **kwargs)


def is_whole(func: Any, types: Any, operands: Iterable[Tensor]) -> bool:
    """Whether an operator that is made of others comes here as one.

    Autograd's part of the dispatcher takes ``linear`` or ``matmul`` apart before a mode sees it. That part is left out in inference
    mode, and outside of it for tensors that were made there: autocast casts those with ``to`` and not with ``_to_copy``. Tensors of
    classes of their own may have a rule for the whole operator, so theirs are left alone.
    """
    if types or not _is_composite(func):
        return False
    return torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in operands)


@cache
def _is_composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    overload = isinstance(func, torch._ops.OpOverload)
    return overload and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def keep_compiler_out() -> None:
    """Wraps the modes if Dynamo has been imported; cheap to call again."""
    disable: Any = getattr(sys.modules.get(COMPILER), "disable", None)  # missing while Dynamo is being imported
    if disable is None:
        return
    for mode in set(OperatorMode.__subclasses__()) - _hidden:
        _hidden.add(mode)
        mode.__torch_dispatch__ = disable(mode.__torch_dispatch__, recursive=True)  # type: ignore[method-assign]
