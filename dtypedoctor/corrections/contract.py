"""What a correction is, and how it proves that it is in place."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dtypedoctor.kernels.counters import Counters


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A corrective kernel that can be put into a live model.

    Attributes:
        id: kebab-case id, used in ``corrections:`` of a scenario.
        summary: what it changes, one sentence.
        install: takes the model and the dotted module names of the scenario's entry (often unused); raises
            :class:`TargetMismatchError` where the target is not the code it was written for.
    """

    id: str
    summary: str
    install: Callable[[nn.Module, Sequence[str]], Installed]


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

    place = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
    return Installed(target=label, proof=f"{label} now runs {place}", undo=undo, counters=counters)
