"""Where the tensors come from that an op trace finds already there: parameters, buffers, plain attributes, model inputs."""

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from dtypedoctor._torch_private import CALL_CODE, HELD_APART
from dtypedoctor.instrument.frames import local_of
from dtypedoctor.instrument.identity import TensorIds
from dtypedoctor.instrument.naming import Names

MAX_DEPTH = 4
"""How deep objects that hold tensors (caches, batches, lists of them) are searched."""
MAX_HELD = 2000
"""Values looked at in one search, so that an attribute that is half the program costs nothing."""

_OWN = HELD_APART | {"training"}
_OPAQUE = (str, bytes, int, float, complex, bool, type, nn.Module)


class KnownTensors:
    """Names for memory that existed before an op trace began, or was handed to the model.

    Args:
        names: knows the modules.
        ids: numbers memory; the same as the op trace's.
    """

    def __init__(self, names: Names, ids: TensorIds) -> None:
        self._names = names
        self._ids = ids
        self._known: dict[tuple[Any, ...], tuple[str, str]] = {}

    def refresh(self) -> None:
        """Looks at all modules again; what was known stays known."""
        for _, name, tensor, _, is_buffer in self._names.tensors():
            self._learn(tensor, name, "buffer" if is_buffer else "parameter")
        for root in self._names.roots:
            for prefix, module in root.named_modules():
                held = {k: v for k, v in vars(module).items() if k not in _OWN and not k.endswith("_hooks")}
                for path, tensor in tensors_held(held):
                    self._learn(tensor, f"{prefix}.{path}" if prefix else path, "attribute")

    def note_inputs(self, args: Any, kwargs: Any) -> None:
        """The arguments of an outermost module call."""
        for path, tensor in tensors_held({"args": args, "kwargs": kwargs}):
            self._learn(tensor, path, "input")

    def of(self, tensor: Tensor) -> tuple[str | None, str]:
        """Name and origin of the memory of ``tensor``; None and an empty string where it is not known."""
        whole = self._ids.whole(tensor)
        return self._known.get(whole, (None, "")) if whole is not None else (None, "")

    def _learn(self, tensor: Tensor, name: str, origin: str) -> None:
        whole = self._ids.whole(tensor)
        if whole is not None:
            self._known.setdefault(whole, (name, origin))


def tensors_held(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside containers and plain objects, with its path; modules are not entered."""
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_HELD:
        path, item, depth = waiting.pop()
        if isinstance(item, Tensor):
            yield path, item
        elif depth < MAX_DEPTH and id(item) not in seen and not isinstance(item, _OPAQUE):
            seen.add(id(item))
            waiting += [(f"{path}.{key}" if path else str(key), inner, depth + 1) for key, inner in _inside(item)]


def _inside(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    held = getattr(item, "__dict__", None)
    return list(held.items()) if isinstance(held, dict) else []


def call_arguments(module: nn.Module) -> tuple[Any, Any]:
    """Positional and keyword arguments of the call of ``module`` that is being entered; empty where it is not found.

    torch's global pre-hook gets the positional arguments only, so they are read from the frame of the call itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == CALL_CODE.co_name and local_of(frame, "self") is module:
            return local_of(frame, "args") or (), local_of(frame, "kwargs") or {}
        frame = frame.f_back
    return (), {}
