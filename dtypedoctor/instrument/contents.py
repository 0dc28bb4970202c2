"""What is in the value that a module returned: the tensors that can be measured, and what nobody may look into.

Nothing of the program runs here. Containers and objects are read by the methods of Python's own types, whatever their class says of
attributes, length or iteration; an iterator is never advanced. What cannot be read this way is named, so that it is never taken for finite.
"""

import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator, Sequence
from enum import Enum
from gc import get_referents
from math import isfinite
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from dtypedoctor.instrument.readable import Missed, readable
from dtypedoctor.instrument.statistics import Named, measurable

MOST_VALUES = 10_000
"""Values looked at in one result."""
MANY = 100
"""Items of a list from which on it is worth a look whether all of them are whole numbers or strings."""
LONGEST_PATH = 200
"""Characters of a path; the names of deeper values are cut off."""
DEPTH_GIVEN = 2
"""Containers in containers that are searched among the arguments of a call, beside the argument itself."""

_ITERATOR = "reading it would use it up; return a list to have it measured"
_OBJECT = (
    "its attributes cannot be read without running its code; return a tuple or dict of tensors to have it measured"
)
_MANY = f"only the first {MOST_VALUES:,} of its values were measured"
_ARRAY = "only tensors are measured; return one to have it measured"
_NUMBER = "a number that is inf or NaN, in no tensor"

_NO_FLOATS = frozenset(
    {type(None), bool, int, str, bytes, bytearray, range, slice, type(...), torch.Size, torch.dtype, torch.device}
)
"""Exact types of values in which nothing can be inf or NaN."""
_NO_RESULTS = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, Enum, int, str, bytes,
               torch.Generator, torch.layout, torch.memory_format, torch.Stream)  # fmt: skip
"""Base classes of values that hold no results: code, models, names."""
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()), type(OrderedDict().keys()), type(OrderedDict().values()),
          type(OrderedDict().items()), MappingProxyType)  # fmt: skip

_SEARCHED = (tuple, list, dict, set, frozenset, deque)
_IN_DATA = frozenset({UserDict, UserList})

Inside = Sequence[tuple[object, Any]]
"""Keys, indices or names of attributes, and what is there."""


class Found(NamedTuple):
    """A tensor in a result.

    Attributes:
        path: where it is, e.g. ``0``, ``logits`` or ``past.1``; empty where it is the result itself.
        tensor: its values as a plain dense tensor.
        original: what the module returned; gradients arrive there.
    """

    path: str
    tensor: Tensor
    original: Tensor


class Contents(NamedTuple):
    """What is in a result: tensors, and what could not be looked into. Without both, nothing in it can be inf or NaN."""

    tensors: list[Found]
    missed: list[Missed]


def contents(value: Any, given: tuple[Any, Any] = ((), {})) -> Contents:
    """Everything in the result of a call.

    Args:
        value: the result.
        given: positional and keyword arguments of the call. An object among them that comes back (a cache, say) is not searched.
    """
    if type(value) is Tensor and measurable(value):
        return Contents([Found("", value, value)], [])
    if type(value) is float:
        number = torch.tensor(value, dtype=torch.float64)
        return Contents([Found("", number, number)], [])
    search = _Search(given)
    search.through(value)
    return Contents(search.tensors, search.missed)


def tensors_in(value: Any) -> list[Named]:
    """The measurable tensors in the result of a call, with their paths."""
    return [(path, tensor) for path, tensor, _ in contents(value).tensors]


def tensors_given(args: Sequence[object], kwargs: dict[str, object]) -> list[Named]:
    """The measurable tensors among the arguments of a call, with their paths. Only tuples, lists and dicts are searched."""
    found: list[Named] = []
    for name, value in (*enumerate(args), *kwargs.items()):
        kind = type(value)
        if kind is Tensor and isinstance(value, Tensor) and measurable(value):
            found.append((str(name), value))
        elif kind not in _NO_FLOATS:
            _add_given(found, str(name), value, DEPTH_GIVEN)
    return found


def has_floats(value: Any) -> bool:
    """Whether something in ``value`` may be inf or NaN, by its exact type."""
    return type(value) not in _NO_FLOATS


def may_hold_tensors(value: Any) -> bool:
    """Whether :func:`tensors_given` would search ``value``, or read it as a tensor of a class of its own; of that all values of its type are alike."""
    kind = type(value)
    if kind is Tensor or kind in _NO_FLOATS:
        return False
    return issubclass(kind, Tensor) or _in_container(value) is not None


def _add_given(found: list[Named], path: str, value: Any, depth: int) -> None:
    if issubclass(type(value), Tensor):
        tensor = value if measurable(value) else readable(value)
        if isinstance(tensor, Tensor):
            found.append((path, tensor))
    elif depth and (inside := _in_container(value)):
        for key, item in inside:
            if type(item) not in _NO_FLOATS:
                _add_given(found, f"{path}.{key}", item, depth - 1)


class _Search:
    """Goes through one result, in order."""

    def __init__(self, given: tuple[Any, Any]) -> None:
        self.tensors: list[Found] = []
        self.missed: list[Missed] = []
        args, kwargs = given
        self._seen = {id(value) for value in (*args, *kwargs.values()) if not issubclass(type(value), _SEARCHED)}
        self._left = MOST_VALUES

    def through(self, value: Any) -> None:
        """Adds everything in ``value``."""
        waiting = [("", value)]
        while waiting:
            path, item = waiting.pop()
            kind = type(item)
            if kind in _NO_FLOATS:
                continue
            self._left -= 1
            if self._left < 0:
                self.missed.append(Missed(type(value).__name__, _MANY))
                return
            if issubclass(kind, Tensor):
                tensor = item if measurable(item) else readable(item)
                if isinstance(tensor, Tensor):
                    self.tensors.append(Found(path, tensor, item))
                elif tensor is not None:
                    self.missed.append(tensor)
            elif issubclass(kind, (float, complex)):
                self._add_number(item)
            elif id(item) not in self._seen:
                self._seen.add(id(item))
                waiting += reversed([(_joined(path, key), one) for key, one in self._inside(item)])

    def _add_number(self, item: Any) -> None:
        """A number beside tensors is no sample: what is finite has been seen to be, anything else stays open."""
        if not isfinite(abs(item)):
            self.missed.append(Missed(type(item).__name__, _NUMBER))

    def _inside(self, item: Any) -> Inside:
        kind = type(item)
        if issubclass(kind, _NO_RESULTS):
            return ()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, (numpy.ndarray, numpy.generic)):
            self._add_array(item, numpy)
            return ()
        held = _in_container(item)
        if held is not None:
            return held if kind in (tuple, list, dict) else (*held, *self._beside(item, held))
        layout = _layout_of(kind)
        if layout.missed is not None:
            self.missed.append(layout.missed)
        return list(layout.attributes(item))

    def _add_array(self, item: Any, numpy: Any) -> None:
        array = issubclass(type(item), numpy.ndarray)
        letter = (numpy.ndarray if array else numpy.generic).dtype.__get__(item).kind
        if array and letter in "fcOV":
            self.missed.append(Missed(f"numpy.{type(item).__name__}", _ARRAY))
        elif letter in "fc":
            self._add_number(item)

    def _beside(self, item: Any, held: Inside) -> Inside:
        """What a container of a class of its own holds as attributes and not as items."""
        items = {id(one) for _, one in held}
        behind = "data" if _IN_DATA & set(type(item).__mro__) else ""
        attributes = _layout_of(type(item)).attributes(item)
        return [(name, one) for name, one in attributes if id(one) not in items and name != behind]


def _in_container(value: Any) -> Inside | None:
    """What is in one of Python's containers; None for everything else."""
    kind = type(value)
    if issubclass(kind, (tuple, list)):
        return _in_sequence(value)
    if issubclass(kind, dict):
        return list(dict.items(value))
    for builtin in (set, frozenset, deque):
        if issubclass(kind, builtin):
            return list(enumerate(builtin.__iter__(value)))
    if kind in _VIEWS:
        # What is in the mapping that a view shows.
        return [pair for one in get_referents(value) for pair in _in_container(one) or ()]
    if not _IN_DATA.isdisjoint(kind.__mro__):
        return _in_container(dict(_layout_of(kind).attributes(value)).get("data"))
    return None


def _in_sequence(value: Any) -> Inside:
    """What is in a tuple or a list, numbers and text left out."""
    kind = type(value)
    if kind is list and len(value) > MANY and _NO_FLOATS.issuperset(map(type, value)):
        return ()
    items = tuple.__iter__(value) if issubclass(kind, tuple) else list.__iter__(value)
    return [(i, one) for i, one in enumerate(items) if type(one) not in _NO_FLOATS]


_BY_C = (GetSetDescriptorType, MemberDescriptorType)


class _Layout:
    """Where objects of a class keep their attributes: no property and no ``__getattr__`` is asked for them.

    Attributes:
        missed: why not everything in such an object can be seen, if so.
    """

    __slots__ = ("_dictionaries", "_slots", "held", "missed")

    def __init__(self, kind: type) -> None:
        self.held = ref(kind)
        own = [(name, one) for base in kind.__mro__ for name, one in vars(base).items()]
        self._dictionaries = [d for name, d in own if name == "__dict__" and type(d) in _BY_C]
        self._slots = [(n, d) for n, d in own if type(d) is MemberDescriptorType and not n.startswith("__")]
        self.missed = _missed(kind, own)

    def attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Names and values of what ``value`` holds."""
        for dictionary in self._dictionaries:
            yield from dictionary.__get__(value).items()
        for name, slot in self._slots:
            try:
                yield name, slot.__get__(value)
            except AttributeError:  # empty
                continue


_layouts: dict[int, _Layout] = {}


def _layout_of(kind: type) -> _Layout:
    found = _layouts.get(id(kind))
    if found is None or found.held() is not kind:
        found = _layouts[id(kind)] = _Layout(kind)
    return found


def _missed(kind: type, own: list[tuple[str, Any]]) -> Missed | None:
    """Why not everything in objects of a class can be seen, if so; ``own`` is what its bases and it define."""
    if any(name == "__next__" for name, _ in own):
        return Missed(kind.__name__, _ITERATOR)
    slots = sum(type(one) is MemberDescriptorType for _, one in own)
    # Whether C code keeps something in objects of a class that no attribute shows; what Python's own library keeps is no result
    plain = max(base.__basicsize__ for base in kind.__mro__ if _is_of_python(base))
    hides = kind.__basicsize__ > max(plain, _Empty.__basicsize__) + (slots + 2) * POINTER
    return Missed(kind.__name__, _OBJECT) if hides else None


def _is_of_python(kind: type) -> bool:
    module = kind.__module__.partition(".")[0]
    return module in sys.stdlib_module_names and module not in ("array", "asyncio", "_asyncio")


class _Empty:
    """An object with nothing but a dictionary and room for weak references."""


POINTER = 8
"""Bytes of a slot, of the dictionary's, and of that for weak references."""


def _joined(path: str, key: object) -> str:
    name = key if type(key) is str else str(key) if type(key) in (int, float, bool) else type(key).__name__
    return f"{path}.{name}"[:LONGEST_PATH] if path else name[:LONGEST_PATH]
