"""Looks up what the capsule of a stranger names, before anything is made of it, and rejects what is not what its name says."""

import importlib
import inspect
import types
from enum import Enum
from typing import Any

import torch
from torch import nn

from dtypedoctor._torch_private import OpOverload, schema_of
from dtypedoctor.errors import UsageError
from dtypedoctor.replay.allowed import Named
from dtypedoctor.replay.capsule import ALLOW_CODE, Capsule

__all__ = ["require_known"]

_MACHINERY = frozenset({*dir(nn.Module), *vars(nn.Module()), "_init_flat_weights"}) - {"training"}
"""What every module has: with another forward, or a hook, an instance would do what its class does not."""


def require_known(capsule: Capsule) -> None:
    """Looks up everything that ``capsule`` names. It imports modules of known libraries, and makes nothing.

    Raises:
        UsageError: it holds code, or something in it is not on a list, or not what the list says that it is.
        ImportError: a library is not installed, or has no such module.
    """
    for why in capsule.code():
        raise UsageError(f"{capsule.directory}: replaying runs code: {why}", ALLOW_CODE)
    for named in capsule.named():
        if why := _why_not(named):
            raise UsageError(f"{capsule.directory}: replaying runs code: {why}", ALLOW_CODE)


def _why_not(named: Named) -> str:
    """Why something that is on a list may not be made all the same; empty where it may."""
    if named.role == "operator":
        return "" if _computes(named.name) else f"the operator {named.shown}, which does more than compute"
    if named.role == "dtype":
        return "" if isinstance(getattr(torch, named.name, None), torch.dtype) else f"{named.shown}, which is no dtype"
    module_name, _, path = named.name.partition(":")
    name, _, member = path.partition(".")
    module = importlib.import_module(module_name)
    thing = vars(module).get(name)
    if module_name == "torch.nn.functional":
        fits = isinstance(thing, (types.FunctionType, types.BuiltinFunctionType))
        return "" if fits else f"{named.shown}, which is no function"
    is_own = getattr(thing, "__module__", None) == module_name and getattr(thing, "__qualname__", None) == name
    if not is_own or not _fits(named.role, thing, member):
        return f"{named.shown}, which is no {_KINDS[named.role]} that {module_name} defines"
    for attribute in named.attributes:
        if _replaces(thing, attribute):
            return f"the attribute {attribute} of {named.shown}, which replaces a part of the class"
    return ""


_KINDS = {
    "class": "module class", "forward": "forward of a module", "config": "configuration", "mapping": "output class", "object": "class",
    "function": "function",
}  # fmt: skip


def _fits(role: str, thing: Any, member: str) -> bool:
    """Whether something is of the kind that its role says."""
    if role == "function":
        if isinstance(thing, type):  # a class would be made by whoever calls it
            held = vars(thing).get(member)
            return isinstance(held, staticmethod) or (issubclass(thing, Enum) and member in thing.__members__)
        return isinstance(thing, types.FunctionType) and not member
    if not isinstance(thing, type):
        return False
    if role in ("class", "forward"):
        own = isinstance(vars(thing).get("forward"), types.FunctionType) if role == "forward" else True
        return issubclass(thing, nn.Module) and own
    if role == "config":
        return callable(getattr(thing, "from_dict", None)) and not issubclass(thing, nn.Module)
    if role == "mapping":
        return issubclass(thing, dict)
    return not issubclass(thing, (nn.Module, BaseException))


def _replaces(cls: Any, attribute: str) -> bool:
    """Whether an attribute of an instance takes the place of something that the class calls."""
    if issubclass(cls, nn.Module) and attribute in _MACHINERY:
        return True
    present = inspect.getattr_static(cls, attribute, None)
    return callable(present) or isinstance(present, (staticmethod, classmethod))


def _computes(name: str) -> bool:
    """Whether an operator takes or gives tensors, and no name of a file."""
    _, packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(operator, OpOverload):
        return False
    schema = schema_of(operator)
    values = [*schema.arguments, *schema.returns]
    return any("Tensor" in str(value.type) for value in values) and all("file" not in value.name for value in values)
