"""Describes a module and the values of a call as JSON, with tensors by name, so that the call can be made again without the model around it."""

import functools
import types
from collections.abc import Callable, Mapping
from enum import Enum
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import buffers_of, children_of, class_before_sharding, marks_of_sharding, parameters_of
from dtypedoctor.instrument.frames import importable
from dtypedoctor.instrument.module_tree import has_state, is_sharded

PLAIN = (bool, int, float, str, type(None))


class Tensors:
    """Named copies of tensors on the CPU."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._once: dict[int, tuple[str, Tensor]] = {}
        self.objects = 0
        """Objects described with tensors in them."""

    def keep(self, key: str, tensor: Tensor) -> str:
        """Keeps a copy of ``tensor`` as it is now; the key under which it is kept."""
        self._kept[key] = tensor.detach().to("cpu", copy=True).contiguous()
        return key

    def keep_once(self, key: str, tensor: Tensor) -> str:
        """The same, but a tensor that was kept once already, as that of a tied weight, stays under its first key."""
        known = self._once.get(id(tensor))
        if known is None or known[1] is not tensor:
            known = self._once[id(tensor)] = (self.keep(key, tensor), tensor)
        return known[0]

    def named(self) -> dict[str, Tensor]:
        """Everything that is kept."""
        return dict(self._kept)


class Operator(nn.Module):
    """Stands for one operator of torch, so that it can be kept and made again as a module call can.

    Args:
        name: ``aten.mul.Tensor``.
        backward: shape and dtype of the gradient that it gave in a backward pass; it runs in one then. None for a forward.
    """

    def __init__(self, name: str, backward: "tuple[list[int], torch.dtype] | None" = None) -> None:
        super().__init__()
        self.operator = name
        self.backward = backward
        if backward is not None:
            shape, dtype = backward
            self.zero = nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it; in a backward pass what it returns is the gradient of a parameter that is 0, which is returned here."""
        operator: Any = functools.reduce(getattr, self.operator.split("."), torch.ops)
        if self.backward is None:
            return operator(*args, **kwargs)
        return _InBackward.apply(self.zero, lambda: operator(*args, **kwargs))


class _InBackward(torch.autograd.Function):
    """Returns its input, and as its gradient whatever a function gives."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor, gradient: Callable[[], Any]) -> Tensor:
        ctx.gradient = gradient
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        with torch.no_grad():
            return ctx.gradient(), None


Name = Callable[[Any], str]
"""Gives a class or function the name by which it can be found again; raises TypeError where it has none."""


def recipe(
    module: nn.Module, tensors: Tensors, *, path: str = "weight.", name_of: "Name | None" = None
) -> dict[str, Any]:
    """How to make ``module`` without calling its constructor.

    ``class`` (as ``package.module:Name``), ``attributes`` (see :func:`describe`; what cannot be described is left out),
    ``parameters`` and ``buffers`` (keys of tensors; of packed 4-bit weights ``{"packed": key, "state": {...}}``, with what
    bitsandbytes would save beside them), ``children`` by name, ``forward`` where the instance has its own one.
    With ``name_of``, which then names classes instead of :func:`importable`, attributes keep
    tensors and objects that they hold as well.

    Raises:
        TypeError: the class, or the instance's own forward, cannot be imported from anywhere.
    """
    if isinstance(module, Operator):
        return {
            "operator": module.operator,
            "class": "",
            "attributes": {},
            "parameters": {},
            "buffers": {},
            "children": {},
        }
    named = name_of or importable
    unheld = {*_TORCH, *marks_of_sharding(module)}
    described: dict[str, Any] = {
        "class": named(class_before_sharding(module) if is_sharded(module) else type(module)),
        "attributes": {},
        "parameters": {},
        "buffers": {},
        "children": {},
    }
    for name, value in module.__dict__.items():
        if name == "forward":
            described["forward"] = named(getattr(value, "__func__", value))
        elif name not in unheld:
            key = f"attribute.{path}{name}".replace(".", "/")  # the depth of an object counts from here
            found = describe(value, tensors if name_of is not None else None, key, named)
            if "opaque" not in found:
                described["attributes"][name] = found
    for kind, held in (("parameters", parameters_of(module)), ("buffers", buffers_of(module))):
        for name, tensor in held.items():
            described[kind][name] = _keep(tensor, tensors, f"{path}{name}") if tensor is not None else None
    for name, child in children_of(module).items():
        described["children"][name] = (
            None if child is None else recipe(child, tensors, path=f"{path}{name}.", name_of=name_of)
        )
    return described


def _keep(tensor: Tensor, tensors: Tensors, key: str) -> str | dict[str, Any]:
    state: Any = getattr(tensor, "quant_state", None)
    if state is None:
        return tensors.keep_once(key, tensor)
    parts = {name: tensors.keep(f"{key}.packed.{name}", part) for name, part in state.as_dict(packed=True).items()}
    return {"packed": tensors.keep(f"{key}.packed", tensor), "state": parts}


_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""What ``nn.Module.__init__`` makes and nobody sets."""


def describe(value: Any, tensors: Tensors | None, path: str, named: Name | None = None) -> dict[str, Any]:
    """A value as JSON: ``{"value": ...}``, ``{"float": "nan"}``, ``{"tensor": key}``, ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"set": [...]}``, ``{"size": [...]}`` (of torch), ``{"dict": {...}}``,
    ``{"pairs": [[key, value], ...]}`` (a dictionary whose keys are no texts), ``{"mapping": "module:Class", "values": {...}}``, ``{"dtype": name}``, ``{"device": name}``, ``{"function": "module:name"}`` (a class as well),
    ``{"partial": {...}, "args": [...], "kwargs": {...}}`` (of ``functools``),
    ``{"config": "module:Class", "values": {...}}``, ``{"object": "module:Class", "values": {...}}``, else ``{"opaque": class name}``.

    Args:
        value: what to describe.
        tensors: keeps tensors; without it they are opaque, and so are objects, such as key-value caches, that hold some.
        path: key for a tensor.
        named: names classes and functions; :func:`importable` if left out.
    """  # fmt: skip
    named = named or importable
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
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _describe_mapping(value._asdict(), tensors, path, named, type(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [describe(item, tensors, f"{path}.{i}", named) for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)) and any("opaque" in item for item in items):
            return {"opaque": type(value).__name__}
        return {_CONTAINERS.get(type(value), "tuple" if isinstance(value, tuple) else "list"): items}
    if isinstance(value, Mapping):
        return _describe_mapping(value, tensors, path, named)
    return _describe_object(value, tensors, path, named)


_CONTAINERS = {torch.Size: "size", set: "set", frozenset: "set"}


def _describe_mapping(
    value: Mapping[Any, Any], tensors: Tensors | None, path: str, named: Name, made_as: type | None = None
) -> dict[str, Any]:
    """A mapping, or what a class ``made_as`` makes of its items."""
    made_as = made_as or type(value)
    held = {name: describe(item, tensors, f"{path}.{name}", named) for name, item in value.items()}
    if made_as is dict and not all(isinstance(name, str) for name in value):
        return {"pairs": [[describe(name, None, "", named), item] for name, item in held.items()]}
    by_name = {str(name): item for name, item in held.items()}
    return {"dict": by_name} if made_as is dict else {"mapping": named(made_as), "values": by_name}


def _describe_object(value: Any, tensors: Tensors | None, path: str, named: Name) -> dict[str, Any]:
    to_dict = getattr(value, "to_diff_dict", None) or getattr(
        value, "to_dict", None
    )  # the former without what is default
    try:
        if callable(to_dict) and hasattr(type(value), "from_dict"):
            return {
                "config": named(type(value)),
                "values": describe(to_dict(), None, "", named),
                "chosen": {name: describe(getattr(value, name, None), None, "", named) for name in _CHOSEN},
            }
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            return {"function": named(value)}
        if isinstance(value, functools.partial):
            kwargs = {name: describe(item, tensors, f"{path}.{name}", named) for name, item in value.keywords.items()}
            args = [describe(item, tensors, f"{path}.{number}", named) for number, item in enumerate(value.args)]
            return {"partial": describe(value.func, None, "", named), "args": args, "kwargs": kwargs}
        if isinstance(value, Enum):
            return {"function": f"{named(type(value))}.{value.name}"}
        if tensors is not None and not isinstance(value, nn.Module) and path.count(".") <= _DEEPEST:
            return _describe_state(value, tensors, path, named)
    except TypeError:
        pass
    return {"opaque": type(value).__name__}


def _describe_state(value: Any, tensors: Tensors, path: str, named: Name) -> dict[str, Any]:
    """An object by its class and what it holds; what cannot be described is left out.

    Raises:
        TypeError: it is more than what it holds, or there are too many of them.
    """
    tensors.objects += 1
    if tensors.objects > _MOST_OBJECTS or not has_state(value):
        raise TypeError
    held = {name: describe(item, tensors, f"{path}.{name}", named) for name, item in vars(value).items()}
    kept = {name: item for name, item in held.items() if "opaque" not in item}
    return {"object": named(type(value)), "values": {"dict": kept}}


_CHOSEN = ("_attn_implementation", "_experts_implementation")
"""What a configuration has been told since it was made; ``to_dict`` leaves it out."""

_MOST_OBJECTS = 2000
"""Objects that are described in one call: an attribute may lead to all of a program."""
_DEEPEST = 8
"""Objects in objects that are followed: a key-value cache has layers, which have tensors; a ring would have no end."""
