"""Describes modules and values so that a plain Python script can make them again."""

import types
from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import buffers_of, children_of, parameters_of

PLAIN = (bool, int, float, str, type(None))


class Tensors:
    """Named copies of tensors on the CPU."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def keep(self, key: str, tensor: Tensor) -> str:
        """Keeps a copy of ``tensor`` as it is now; the key under which it is kept."""
        self._kept[key] = tensor.detach().to("cpu", copy=True).contiguous()
        return key

    def named(self) -> dict[str, Tensor]:
        """Everything that is kept."""
        return dict(self._kept)


def recipe(module: nn.Module, tensors: Tensors, *, own: bool, path: str = "weight.") -> dict[str, Any]:
    """How to make ``module`` without calling its constructor.

    ``class`` (as ``package.module:Name``), ``attributes`` (see :func:`describe`; what cannot be described is left out),
    ``parameters`` and ``buffers`` (keys of tensors; of packed 4-bit weights ``{"packed": key, "state": {...}}``, with what
    bitsandbytes would save beside them), ``children`` by name, ``forward`` where the instance has its own one.
    With ``own`` the modules in it are not described, only named: ``children`` then holds None for each, and real
    containers for lists of them.

    Raises:
        TypeError: the class, or the instance's own forward, cannot be imported from anywhere.
    """
    described: dict[str, Any] = {
        "class": importable(type(module)),
        "attributes": {},
        "parameters": {},
        "buffers": {},
        "children": {},
    }
    for name, value in module.__dict__.items():
        if name == "forward":
            described["forward"] = importable(getattr(value, "__func__", value))
        elif name not in _TORCH:
            found = describe(value, None, "")
            if "opaque" not in found:
                described["attributes"][name] = found
    for kind, held in (("parameters", parameters_of(module)), ("buffers", buffers_of(module))):
        for name, tensor in held.items():
            described[kind][name] = _keep(tensor, tensors, f"{path}{name}") if tensor is not None else None
    for name, child in children_of(module).items():
        if child is None or (own and not _holds_only_modules(child)):
            described["children"][name] = None
        else:
            described["children"][name] = recipe(child, tensors, own=own, path=f"{path}{name}.")
    return described


def _keep(tensor: Tensor, tensors: Tensors, key: str) -> str | dict[str, Any]:
    state: Any = getattr(tensor, "quant_state", None)
    if state is None:
        return tensors.keep(key, tensor)
    parts = {name: tensors.keep(f"{key}.packed.{name}", part) for name, part in state.as_dict(packed=True).items()}
    return {"packed": tensors.keep(f"{key}.packed", tensor), "state": parts}


_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""What ``nn.Module.__init__`` makes and nobody sets."""


def describe(value: Any, tensors: Tensors | None, path: str) -> dict[str, Any]:
    """A value as JSON: ``{"value": ...}``, ``{"float": "nan"}``, ``{"tensor": key}``, ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": {...}}``,
    ``{"pairs": [[key, value], ...]}`` (a dictionary whose keys are no texts), ``{"mapping": "module:Class", "values": {...}}``, ``{"dtype": name}``, ``{"device": name}``, ``{"function": "module:name"}`` (a class as well),
    ``{"config": "module:Class", "values": {...}}``, ``{"object": "module:Class", "values": {...}}``, else ``{"opaque": class name}``.

    Args:
        value: what to describe.
        tensors: keeps tensors; without it they are opaque, and so are objects, such as key-value caches, that hold some.
        path: key for a tensor.
    """  # fmt: skip
    if isinstance(value, Tensor):
        return {"tensor": tensors.keep(path, value)} if tensors is not None else {"opaque": "Tensor"}
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}
    if isinstance(value, PLAIN):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "cpu"}  # where the tensors are kept
    if isinstance(value, (tuple, list)):
        items = [describe(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if type(value) is dict and not all(isinstance(name, str) for name in value):
        pairs = [(describe(name, None, ""), describe(item, tensors, f"{path}.{name}")) for name, item in value.items()]
        return {"pairs": [list(pair) for pair in pairs]}
    if isinstance(value, Mapping):
        items_by_name = {str(name): describe(item, tensors, f"{path}.{name}") for name, item in value.items()}
        return (
            {"dict": items_by_name}
            if type(value) is dict
            else {"mapping": importable(type(value)), "values": items_by_name}
        )
    return _describe_object(value, tensors, path)


def _describe_object(value: Any, tensors: Tensors | None, path: str) -> dict[str, Any]:
    to_dict = getattr(value, "to_dict", None)
    try:
        if callable(to_dict) and hasattr(type(value), "from_dict"):
            return {
                "config": importable(type(value)),
                "values": describe(to_dict(), None, ""),
                "chosen": {name: describe(getattr(value, name, None), None, "") for name in _CHOSEN},
            }
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            return {"function": importable(value)}
        if tensors is not None and not isinstance(value, nn.Module) and path.count(".") <= _DEEPEST:
            return _describe_state(value, tensors, path)
    except TypeError:
        pass
    return {"opaque": type(value).__name__}


def _describe_state(value: Any, tensors: Tensors, path: str) -> dict[str, Any]:
    """An object by its class and what it holds; what cannot be described is left out."""
    cls = importable(type(value))
    held = {name: describe(item, tensors, f"{path}.{name}") for name, item in vars(value).items()}
    return {"object": cls, "values": {"dict": {name: item for name, item in held.items() if "opaque" not in item}}}


_CHOSEN = ("_attn_implementation", "_experts_implementation")
"""What a configuration has been told since it was made; ``to_dict`` leaves it out."""

_DEEPEST = 8
"""Objects in objects that are followed: a key-value cache has layers, which have tensors; a ring would have no end."""


def importable(thing: Any) -> str:
    """``module:qualified.name`` of a class or function that can be imported by it.

    Raises:
        TypeError: it cannot.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not module or module == "__main__" or "<" in name:
        raise TypeError(f"{name or thing} cannot be imported from anywhere")
    return f"{module}:{name}"


def _holds_only_modules(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.ModuleDict)
