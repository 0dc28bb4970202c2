"""The base of the modes that see operators: the compiler stays out of them, and is not loaded for their sake."""

from collections.abc import Iterable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from dtypedoctor._torch_private import DispatchMode, OpOverload, is_composite, modes_on, pop_mode, push_mode, uncompiled

_hidden: set[type] = set()


class OperatorMode(DispatchMode):
    """A dispatch mode whose own code is never compiled.

    torch wraps a mode's ``__torch_dispatch__`` so that Dynamo leaves it alone, and the wrapper imports Dynamo at the first
    operator: more than a second of processor time in a program that compiles nothing. Here the function is wrapped once
    Dynamo has come, which only matters from then on; call :func:`keep_compiler_out` when it comes.
    """

    def __enter__(self) -> Self:
        keep_compiler_out()
        super().__enter__()
        return self

    def leave(self) -> None:
        """Takes the mode off, if it is on and wherever it stands: an exception may have kept it on for longer than its block."""
        if not any(mode is self for mode in modes_on()):
            return
        above = []
        while modes_on()[-1] is not self:
            above.append(pop_mode())
        try:
            self.__exit__(None, None, None)
        finally:
            for mode in reversed(above):
                push_mode(mode)

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
    return isinstance(func, OpOverload) and is_composite(func)


def keep_compiler_out() -> None:
    """Wraps the modes if Dynamo has been imported; cheap to call again."""
    for mode in set(OperatorMode.__subclasses__()) - _hidden:
        hidden = uncompiled(mode.__torch_dispatch__)
        if hidden is None:
            return
        _hidden.add(mode)
        mode.__torch_dispatch__ = hidden  # type: ignore[method-assign]
