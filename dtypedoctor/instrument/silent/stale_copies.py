"""Copies of its weights that a model keeps, on a parameter or on a module, and that have not been updated with the weights."""

import dis
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.frames import Line, is_users
from dtypedoctor.instrument.module_tree import named_modules, own_parameters

__all__ = ["StaleCopy", "line_that_stores", "stale_copies", "updated"]


@dataclass(frozen=True, slots=True, eq=False)
class StaleCopy:
    """A tensor of the shape of a weight, with other values than it.

    Attributes:
        module, owner: the module that has the weight, by its dotted name and itself.
        attribute: of the weight or the module, by which the copy is kept.
        kept, weight: the two.
    """

    module: str
    owner: nn.Module
    attribute: str
    kept: Tensor
    weight: Tensor


def stale_copies(model: nn.Module) -> list[StaleCopy]:
    """What may be stale copies. Waits for the device."""
    found: list[StaleCopy] = []
    for name, module in named_modules(model):
        weights = own_parameters(module)
        for weight in weights:
            found += _among(name, module, vars(weight), [weight])
        own = {key: value for key, value in vars(module).items() if key not in _REGISTERED}
        found += _among(name, module, own, weights)
    return found


_REGISTERED = frozenset(vars(nn.Module()))


def _among(name: str, module: nn.Module, attributes: Mapping[str, Any], weights: list[Tensor]) -> Iterator[StaleCopy]:
    for attribute, value in attributes.items():
        for _, kept in tensors_in(value):
            alike = [weight for weight in weights if weight.shape == kept.shape and weight is not kept]
            if len(alike) == 1 and kept.is_floating_point() and not torch.equal(alike[0].detach().to(kept), kept):
                yield StaleCopy(name, module, attribute, kept, alike[0])


@contextmanager
def updated(copies: Iterable[StaleCopy]) -> Iterator[None]:
    """Inside, the copies are what their weights are now."""
    before = [(copy.kept, copy.kept.data) for copy in copies]
    try:
        for copy in copies:
            copy.kept.data = copy.weight.detach().to(copy.kept)
        yield
    finally:
        for kept, data in before:
            kept.data = data


def line_that_stores(copy: StaleCopy) -> str | None:
    """The first line of code that sets an attribute of its name: in the file of the module's class, else in the only file that does; None otherwise."""
    lines = [line for each in gc.get_objects() for line in _storing(each, copy.attribute)]
    classes = {cls.__module__ for cls in type(copy.owner).__mro__}
    lines = [line for line in lines if line.module in classes] or lines
    if len({line.code.co_filename for line in lines}) != 1:
        return None
    return min(lines, key=lambda line: line.number).source


def _storing(function: object, attribute: str) -> Iterator[Line]:
    """The lines of a function of the program, or of a library, that set an attribute of this name; none of any other object."""
    if type(function) is not FunctionType:
        return
    code, module = function.__code__, function.__globals__.get("__name__", "")
    if attribute not in code.co_names or not is_users(module):
        return
    for step in dis.get_instructions(code):
        number = step.positions.lineno if step.positions is not None else None
        if step.opname == "STORE_ATTR" and step.argval == attribute and number is not None:
            yield Line(code, module, number)
