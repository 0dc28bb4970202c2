"""Values that are not finite and leave torch: for numpy, as numbers in a list, into a file or to another process.

No operator runs when a tensor is read like that, so no mode sees it. The methods that do it are wrapped, once something is known not to be
finite: a program in which everything is finite runs with torch's own.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dtypedoctor.instrument.guard import Guard

WAYS = {"numpy": "numbers", "tolist": "numbers", "__reduce_ex__": "saved"}
"""Methods by which values leave, and what that is called in the trace."""


class Exports:
    """Calls back with each tensor that is read as a whole.

    Args:
        guard: keeps errors from the program.
        left: called with the way, as :data:`WAYS` has it, and the tensor.
    """

    def __init__(self, guard: Guard, left: Callable[[str, Tensor], None]) -> None:
        self._left = guard.shield(left, "values that leave torch")
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begins to notice; cheap to call again."""
        if not self._undo:
            for name, way in WAYS.items():
                self._wrap(name, way)

    def stop(self) -> None:
        """Puts back what was replaced."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, name: str, way: str) -> None:
        original: Any = getattr(Tensor, name)
        own = name in vars(Tensor)

        def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._left(way, tensor)
            return original(tensor, *args, **kwargs)

        wrapper.__name__, wrapper.__doc__ = name, original.__doc__
        wrapper.__qualname__ = original.__qualname__
        setattr(Tensor, name, wrapper)

        def undo() -> None:
            if vars(Tensor).get(name) is not wrapper:
                return  # the program has put something of its own there
            setattr(Tensor, name, original) if own else delattr(Tensor, name)

        self._undo.append(undo)
