"""What a module holds, without a call of the program's code.

``modules``, ``named_parameters`` and the like are methods that classes override, to count, to hide parts, or to gather a sharded weight; those of torch
call those of each child. These read the dictionaries in which ``nn.Module`` keeps what it was given, past ``__getattr__`` as well.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import COMPILED_MODULE, buffers_of, children_of, parameters_of

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
