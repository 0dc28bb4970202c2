"""Patches that were prepared and are not in place.

A patcher keeps the original under another name and then replaces the method. Where it refuses after the first half, the kept
original and the method that runs are the same function: the code object tells, the presence of the backup does not.
"""

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any
from weakref import WeakSet

from torch import nn

from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.trace.records.silent import Unpatched

BACKUP = "orig"
"""Part of the names under which originals are kept."""


class PatchCheck:
    """Writes an :class:`Unpatched` for each class whose kept original is what still runs."""

    def __init__(self, notes: Notes, names: Names) -> None:
        self._notes = notes
        self._names = names
        self._roots: WeakSet[nn.Module] = WeakSet()
        self._classes: set[type] = set()

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins; at the first one of a module the classes in it are looked at."""
        if module in self._roots:
            return
        self._roots.add(module)
        for child in module.modules():
            if type(child) in self._classes:
                continue
            self._classes.add(type(child))
            place = self._names.find(child)
            for attribute, method, source in _unpatched(type(child)):
                found = Unpatched(class_=type(child).__name__, attribute=attribute, method=method, source=source)
                self._notes.once(found, (type(child), attribute), place[1] if place is not None else None)


def _unpatched(cls: type) -> Iterator[tuple[str, str, str]]:
    """Attributes that keep what a method was before a patch, though the method still is that; the method, and where its code stands."""
    methods = {name: _code(cls, name) for name in dir(cls) if BACKUP not in name.lower()}
    for attribute in _backups(cls):
        kept = _code(cls, attribute)
        if kept is None:
            continue
        source = f"{kept.co_filename.rsplit('/', 1)[-1]}:{kept.co_firstlineno}"
        for method in [name for name, code in methods.items() if code is kept]:
            yield attribute, method, source


def _backups(cls: type) -> Iterator[str]:
    """Attributes of a class and its bases whose names say that they keep what was there before."""
    for owner in cls.__mro__:
        if owner is not nn.Module and owner is not object:
            yield from (name for name in vars(owner) if BACKUP in name.lower())


def _code(cls: type, name: str) -> Any:
    """The code object that a call of a method runs; None for what is no Python function."""
    found = inspect.getattr_static(cls, name, None)
    function = inspect.unwrap(found) if isinstance(found, FunctionType) else None
    return function.__code__ if isinstance(function, FunctionType) else None
