"""What a module holds, without a call of the program's code.

``modules``, ``named_parameters`` and the like are methods that classes override, to count, to hide parts, or to gather a sharded weight; those of torch
call those of each child. These read the dictionaries in which ``nn.Module`` keeps what it was given, past ``__getattr__`` as well.

Which module calls a rank of a job can make again alone is here, too: those that issue no collective. Of ``DistributedDataParallel`` that is the module
inside of it, of a program that communicates by itself the outermost module. Under FSDP2 (``fully_shard``) it is each unit that holds no other, and each
module between units, as long as their parameters are unsharded: from the all-gather before a unit's forward to its end, and in the backward pass from
the next all-gather to the reduce-scatter. Nothing is gathered here. FSDP1 keeps its parameters in flat tensors of its own, and DeepSpeed's ZeRO-3 gathers
them inside of each call and notes on the parameters that it does; their modules are not made again.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtypedoctor._torch_private import (
    COMPILED_MODULE,
    HOOKS_OF_SHARDING,
    buffers_of,
    cast_for_unit,
    children_of,
    class_before_sharding,
    hooks_of,
    marks_of_sharding,
    parameters_of,
)

Value = TypeVar("Value")


class ByModule(Generic[Value]):
    """Values by module, which are not kept alive.

    A ``WeakKeyDictionary`` would compare modules by ``__eq__`` and find them by ``__hash__``, which are the program's to define.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ref[nn.Module], Value]] = {}

    def __setitem__(self, module: nn.Module, value: Value) -> None:
        key, held = id(module), self._held
        held[key] = ref(module, lambda _: held.pop(key, None)), value

    def __getitem__(self, module: nn.Module) -> Value:
        return self._held[id(module)][1]

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._held

    def get(self, module: nn.Module) -> Value | None:
        """Return the value of ``module``; None without one."""
        held = self._held.get(id(module))
        return None if held is None else held[1]

    def pop(self, module: nn.Module) -> Value | None:
        """Take the value of ``module`` out; None without one."""
        held = self._held.pop(id(module), None)
        return None if held is None else held[1]

    def setdefault(self, module: nn.Module, value: Value) -> Value:
        """Return the value of ``module``, which is ``value`` from now on if it had none."""
        if module not in self:
            self[module] = value
        return self[module]

    def items(self) -> Iterator[tuple[nn.Module, Value]]:
        """Each module that is alive, with its value."""
        for owner, value in list(self._held.values()):
            module = owner()
            if module is not None:
                yield module, value


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module in ``root``, itself first, under the first of its dotted names, as ``Module.named_modules()`` has it."""
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        dot = f"{name}." if name else ""
        children = [(dot + child, held) for child, held in list(children_of(module).items()) if held is not None]
        waiting += reversed(children)


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """Every module in ``root``, itself first."""
    return (module for _, module in named_modules(root))


def named_tensors(root: nn.Module, *, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in ``root``, or every buffer, under the first of its dotted names."""
    seen: set[int] = set()
    for prefix, module in named_modules(root):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in list((buffers_of if buffers else parameters_of)(module).items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield dot + name, tensor


def parameters_in(root: nn.Module) -> Iterator[Tensor]:
    """Every parameter in ``root``."""
    return (tensor for _, tensor in named_tensors(root, buffers=False))


def own_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters that a module holds itself."""
    return [parameter for parameter in parameters_of(module).values() if parameter is not None]


def children_in(module: nn.Module) -> list[nn.Module]:
    """The modules that a module holds itself, each once."""
    return list({id(child): child for child in children_of(module).values() if child is not None}.values())


def attribute_of(module: nn.Module, name: str) -> Any:
    """What a module, or the one that was compiled in it, has under ``name`` in itself or its class: no property, no ``__getattr__``; None where it has none."""
    while COMPILED_MODULE in (children := children_of(module)):  # those of TorchScript have no get()
        compiled = children[COMPILED_MODULE]
        assert compiled is not None  # it is what was compiled
        module = compiled
    own = object.__getattribute__(module, "__dict__")
    held = next((names[name] for names in (own, *map(vars, type(module).__mro__)) if name in names), None)
    return None if name not in own and hasattr(type(held), "__get__") else held


def owner_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module in ``root`` that holds the tensor of a dotted name, and the last part of that name."""
    *path, attribute = name.split(".")
    owner = root
    for part in path:
        child = children_of(owner)[part]
        assert child is not None  # a tensor was reached through it
        owner = child
    return owner, attribute


DEEPEST = 12
"""Containers and objects in each other that are followed; what lies deeper is shared with the original."""


def mapped(value: Any, function: Callable[[Tensor], Tensor], memo: dict[int, Any], deepest: int = DEEPEST) -> Any:
    """``value`` with ``function`` applied to every tensor in it.

    Tuples, lists and dictionaries are made again, and so are objects by what they hold, without their constructors (a key-value cache has layers,
    which have tensors). Modules, functions and classes stay the same objects. ``memo`` keeps the originals alive beside the results.
    """
    known = memo.get(id(value))
    if known is not None:
        return known[1]
    if isinstance(value, Tensor):
        made: Any = function(value)
    elif deepest and isinstance(value, (tuple, list, dict)):
        made = _mapped_container(value, function, memo, deepest - 1)
    elif deepest and has_state(value):
        kind: Any = type(value)
        made = kind.__new__(kind)
        memo[id(value)] = (value, made)  # before its contents, which may lead back to it
        for name, item in vars(value).items():
            made.__dict__[name] = mapped(item, function, memo, deepest - 1)
    else:
        return value
    memo[id(value)] = (value, made)
    return made


def held_in(value: Any) -> list[tuple[Any, Any]]:
    """What a tuple, list, dictionary or object holds, by the methods of Python's own types: a mapping of the program's may load weights for each of its
    keys, or raise."""
    if isinstance(value, dict):
        return list(dict.items(value))
    if isinstance(value, list):
        return list(enumerate(list.__iter__(value)))
    if isinstance(value, tuple):
        return list(enumerate(tuple.__iter__(value)))
    return list(vars(value).items()) if has_state(value) else []


def _mapped_container(value: Any, function: Callable[[Tensor], Tensor], memo: dict[int, Any], deepest: int) -> Any:
    kind: Any = type(value)
    if not isinstance(value, dict):
        items = [mapped(item, function, memo, deepest) for _, item in held_in(value)]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    made = kind.__new__(kind)
    put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
    for name, item in held_in(value):
        put(made, name, mapped(item, function, memo, deepest))
    for name, item in getattr(value, "__dict__", {}).items():  # attributes of a class of its own, as ModelOutput's
        made.__dict__[name] = mapped(item, function, memo, deepest)
    return made


_SHARED = (nn.Module, type, torch.Generator, torch.Stream, torch.dtype, torch.device)
_CONSTRUCTORS: tuple[Any, ...] = (object.__new__, SimpleNamespace.__new__)
"""``__new__`` of the classes whose objects are made of their attributes alone."""


def has_state(value: Any) -> bool:
    """Whether ``value`` is an object of a Python class that is made of its attributes alone."""
    if isinstance(value, _SHARED) or callable(value):
        return False
    return hasattr(value, "__dict__") and type(value).__new__ in _CONSTRUCTORS


__all__ = [
    "all_are_here",
    "calls_alone",
    "is_of_several",
    "is_sharded",
    "parameter_not_here",
    "unit_set_aside",
]

SHARDING = "torch.distributed.fsdp"
"""The module that holds both generations of FSDP; it is not imported for this."""
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
"""Containers that are never called themselves."""

Given = Callable[[Any, Any], tuple[Any, Any]]
"""Makes of the positional and keyword arguments of a call what the forward is called with."""


def is_of_several() -> bool:
    """Whether this process is a rank of a job."""
    return dist.is_available() and dist.is_initialized()


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` is a unit of FSDP2."""
    kind = getattr(sys.modules.get(SHARDING), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _is_first_generation(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get(SHARDING), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def _communicates(module: nn.Module) -> bool:
    """Whether calling ``module`` issues collectives that are not in its own forward."""
    return isinstance(module, DistributedDataParallel) or is_sharded(module) or _is_first_generation(module)


def _is_partitioned(module: nn.Module) -> bool:
    """Whether DeepSpeed has partitioned parameters of ``module``: each then has a number of its own."""
    return any(hasattr(parameter, "ds_id") for parameter in parameters_in(module))


def calls_alone(root: nn.Module) -> list[nn.Module]:
    """The outermost ones of those modules in ``root`` that a rank can call alone; of none of them is one inside of another."""
    if _is_first_generation(root) or _is_partitioned(root):
        return []
    inside = (part for part in modules_in(root) if part is not root)
    is_wrapper = isinstance(root, DistributedDataParallel) or type(root) in _UNCALLED
    if not is_wrapper and not any(map(_communicates, inside)):
        return [root]
    return [found for child in children_in(root) for found in calls_alone(child)]


def parameter_not_here(module: nn.Module) -> str:
    """Dotted name in ``module`` of the first parameter of which this rank has only a shard at the moment; empty where it has them all."""
    return next((name for name, one in named_tensors(module, buffers=False) if not all_are_here([one])), "")


def all_are_here(parameters: Iterable[Tensor]) -> bool:
    """Whether this rank has all of these parameters at the moment, and of none a shard alone."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for parameter in parameters:
        if isinstance(parameter, kind) or (parameter.numel() and not parameter.untyped_storage().nbytes()):
            return False
    return True


@contextmanager
def unit_set_aside(module: nn.Module) -> Iterator[Given]:
    """Inside, a unit of FSDP2 is a module as it was before it became one: calling it gathers, frees and registers nothing.

    Yields:
        What makes of a call's arguments those that FSDP2 calls the forward with, by its precision policy; of other modules the same.
    """
    marks = [(part, {name: vars(part)[name] for name in marks_of_sharding(part)}) for part in modules_in(module)]
    unit: Any = module
    kind = type(unit)
    held = [(hooks, list(hooks.items())) for hooks in hooks_of(module)] if is_sharded(module) else []
    given: Given = lambda args, kwargs: (args, kwargs)
    if held:
        cast = cast_for_unit(module)
        given = lambda args, kwargs: cast(*_on_device_of(module, args, kwargs))
    try:
        if held:
            unit.__class__ = class_before_sharding(module)
        for part, values in marks:
            for name in values:
                del vars(part)[name]
        for hooks, items in held:
            for number, hook in items:
                if str(getattr(hook, "__module__", "")).startswith(HOOKS_OF_SHARDING):
                    del hooks[number]
        yield given
    finally:
        unit.__class__ = kind
        for part, values in marks:
            vars(part).update(values)
        for hooks, items in held:
            hooks.clear()
            hooks.update(items)


def _on_device_of(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with CPU tensors on the device of the parameters, where FSDP2 puts what its root is called with."""
    device = next((parameter.device for parameter in parameters_in(module)), None)
    memo: dict[int, Any] = {}

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device) if device is not None and tensor.device.type == "cpu" and tensor.dim() else tensor

    return mapped(args, moved, memo), mapped(kwargs, moved, memo)
