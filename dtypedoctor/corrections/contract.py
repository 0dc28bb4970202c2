"""What a correction is, and how it proves that it is in place."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dtypedoctor.corrections.counters import Counters
from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import Correction, known, registered, resolve

__all__ = ["Counters", "Installed", "TargetMismatchError", "put_in", "replace_attribute", "require_signature"]


class TargetMismatchError(Exception):
    """The code that a correction is meant for is not the code that is there; the message gives the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A correction that is in place.

    Attributes:
        target: dotted name of what was replaced.
        proof: how it is known to be in place, in words (e.g. which code object runs now).
        undo: puts the original back; calling it twice does no harm.
        counters: ``hits``, and the element counters ``rescued`` (non-finite results replaced) and ``clamped``.
    """

    target: str
    proof: str
    undo: Callable[[], None]
    counters: Counters = field(default_factory=Counters)


def put_in(name: str, model: nn.Module, modules: Sequence[str]) -> Installed:
    """Installs the registered correction of this id in ``model``.

    Raises:
        UsageError: no correction has this id, or its code cannot be imported.
        TargetMismatchError: the code is not what the correction was written for; the model is as it was.
    """
    correction = registered(Correction).get(name)
    if correction is None:
        raise UsageError(f"there is no correction {name!r}", known(Correction))
    try:
        install = resolve(correction.install)
    except ImportError as error:
        raise UsageError(f"correction {name}: cannot import {correction.install}: {error}") from error
    installed: Installed = install(model, modules)
    return installed


def require_signature(function: Callable[..., Any], expected: Sequence[str], target: str) -> None:
    """Checks the parameter names of ``function``.

    Raises:
        TargetMismatchError: they differ from ``expected``; annotations and defaults are ignored.
    """
    found = list(inspect.signature(function).parameters)
    if found != list(expected):
        raise TargetMismatchError(
            f"{target} takes ({', '.join(found)}), this correction was written for ({', '.join(expected)})"
        )


def replace_attribute(owner: Any, name: str, replacement: Callable[..., Any], counters: Counters) -> Installed:
    """Replaces ``owner.name`` (a class's method or a module's function) and proves it by looking it up again.

    Raises:
        TargetMismatchError: the lookup afterwards does not find ``replacement``'s code.
    """
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    found = inspect.unwrap(getattr(owner, name))
    code = getattr(found, "__code__", None)
    label = f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', owner.__name__)}.{name}".lstrip(".")
    if code is not inspect.unwrap(replacement).__code__:
        setattr(owner, name, original)
        raise TargetMismatchError(f"{label} was set but another function answers to it")

    def undo() -> None:
        setattr(owner, name, original)

    place = f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])}:{code.co_firstlineno}"
    return Installed(target=label, proof=f"{label} now runs {place}", undo=undo, counters=counters)
