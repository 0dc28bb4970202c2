"""Finds the module whose Python code stands at a place in a file."""

import inspect
from typing import Any
from weakref import WeakSet

from torch import nn

from dtypedoctor._torch_private import COMPILED_MODULE
from dtypedoctor.instrument.naming import Names


class CodePlaces:
    """Knows where the forward methods of the modules that were called stand.

    Args:
        names: gives modules their dotted names.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._spans: dict[str, list[tuple[int, int, str]]] = {}
        self._seen: set[type] = set()
        self._roots: WeakSet[nn.Module] = WeakSet()

    def learn(self, module: nn.Module) -> None:
        """Takes note of an outermost module and of everything in it, at its first call."""
        if module in self._roots:
            return
        self._roots.add(module)
        for child in module.modules():
            if type(child) in self._seen:
                continue
            place, code = self._names.find(child), _forward(type(child))
            if place is None or code is None:
                continue
            self._seen.add(type(child))
            last = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
            fqn = ".".join(part for part in place[1].split(".") if part != COMPILED_MODULE)
            self._spans.setdefault(code.co_filename, []).append((code.co_firstlineno, last, fqn))

    def module_at(self, place: str) -> str | None:
        """Dotted name of the first module whose forward is at ``FILE:LINE`` (anything after a space is ignored)."""
        file, _, line = place.partition(" ")[0].rpartition(":")
        if not line.isdigit():
            return None
        return next((fqn for first, last, fqn in self._spans.get(file, ()) if first <= int(line) <= last), None)


def _forward(cls: type) -> Any:
    """The code object of a class's forward; None where it is no Python function."""
    method = getattr(cls, "forward", None)
    return getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
