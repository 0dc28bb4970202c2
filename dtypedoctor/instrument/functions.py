"""Notices functions of torch that refuse their operands before any operator runs.

``scaled_dot_product_attention`` and the convolutions check dtypes above the dispatcher, where the op trace does not see.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtypedoctor.interruptions import noticing

GETTER = "__get__"
"""Name of what reads an attribute of a tensor. It computes nothing, and some attributes are refused to tensors of inference mode."""

Listener = Callable[[str, Any, tuple[Any, ...], dict[str, Any], Exception], None]


Made = Callable[[torch.Tensor, float], None]

_OF_NUMBERS = frozenset({torch.tensor, torch.as_tensor})


class FunctionErrors(TorchFunctionMode):
    """Tells ``listener`` the op name, the function, its arguments and the error of each torch function that raises.

    ``made`` is told of each tensor that is made of a Python number, and of that number: no operator sees what rounding made of it.

    To be opened and closed within one call of a module: while one of its own functions runs (``Tensor.backward`` is one),
    torch holds the mode aside, and closing it then would leave it active for good.
    """

    def __init__(self, listener: Listener, made: Made) -> None:
        super().__init__()
        self._listener = listener
        self._made = made
        self._is_open = False

    def open(self) -> None:
        """Begins to watch the functions of this thread."""
        if not self._is_open:
            self._is_open = True
            self.__enter__()

    def close(self) -> None:
        """Stops watching."""
        if self._is_open:
            self._is_open = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls ``func`` as it is."""
        arguments = dict(kwargs or {})

        def refused(error: Exception) -> None:
            if getattr(func, "__name__", "") != GETTER:
                self._listener(op_name(func), func, args, arguments, error)

        with noticing(refused, Exception):
            result = func(*args, **arguments)
        if func in _OF_NUMBERS and args and isinstance(args[0], float):
            self._made(result, args[0])
        return result


def op_name(func: Any) -> str:
    """``aten.NAME.default`` for a function that an operator of torch stands for, else ``function.NAME``."""
    name = str(getattr(func, "__name__", "")) or "unknown"
    return f"aten.{name}.default" if hasattr(torch.ops.aten, name) else f"function.{name}"
