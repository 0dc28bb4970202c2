"""``dataclass`` as the standard library has it, for classes that every process of dtypedoctor defines when it starts.

The standard library compiles the source of up to seven methods for each class: 0.6 ms with Python 3.11. ``dtypedoctor exec`` defines
190 such classes in its own process and 150 in the script's. Here ``__init__`` is the only method that is compiled, and not before it is called: of
most of these classes a run has no instance. The others are closures over the names of the fields. mypy sees the standard library's decorator.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

_put = object.__setattr__

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool = False, slots: bool = False, kw_only: bool = False, **others: bool):
        """Like :func:`dataclasses.dataclass`, which makes the classes that have no slots or that use any of the ``others``."""
        if others or not slots:
            return dataclasses.dataclass(frozen=frozen, slots=slots, kw_only=kw_only, **others)

        def decorate(cls: type) -> type:
            given = {name for name, value in vars(cls).items() if value is not None}
            cls.__doc__ = cls.__doc__ or cls.__name__  # else the standard library writes down the signature
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
            for name, method in _methods(made, frozen=frozen).items():
                if name not in given:
                    setattr(made, name, method)
            return made

        return decorate


def _methods(cls: type, *, frozen: bool) -> dict[str, Any]:
    """The methods of a class whose fields are known, by name.

    Raises:
        TypeError: a field is to be left out of one of them.
    """
    fields = dataclasses.fields(cls)
    if not all(one.init and one.repr and one.compare and one.hash is None for one in fields):
        raise TypeError(f"{cls.__name__}: use dataclasses.dataclass for fields that are left out of a method")
    names = [one.name for one in fields]
    methods = {
        "__init__": _Init(cls, frozen=frozen),
        "__repr__": _repr(names),
    }
    methods |= _comparing(cls, names, is_hashable=frozen)
    return methods | _refusing(cls, names) if frozen else methods


class _Init:
    """Stands for ``__init__`` of a class until that is asked for."""

    __slots__ = ("_cls", "_frozen")

    def __init__(self, cls: type, *, frozen: bool) -> None:
        self._cls = cls
        self._frozen = frozen

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        cls: Any = self._cls
        made: Any = _init(dataclasses.fields(cls), frozen=self._frozen, calls_post_init=hasattr(cls, "__post_init__"))
        cls.__init__ = made
        return made.__get__(instance, owner)


def _init(fields: tuple[Field[Any], ...], *, frozen: bool, calls_post_init: bool) -> Callable[..., None]:
    """``__init__`` of a class: positional parameters first, as the standard library orders them."""
    known: dict[str, Any] = {"_put": _put, "_missing": MISSING}
    by_position: list[str] = ["self"]
    by_name: list[str] = []
    lines = ["pass"]
    for one in fields:
        parameter = value = one.name
        if one.default is not MISSING:
            known[f"_default_{one.name}"] = one.default
            parameter += f"=_default_{one.name}"
        elif one.default_factory is not MISSING:
            known[f"_make_{one.name}"] = one.default_factory
            parameter += "=_missing"
            value = f"_make_{one.name}() if {one.name} is _missing else {one.name}"
        (by_name if one.kw_only else by_position).append(parameter)
        lines.append(f"_put(self, {one.name!r}, {value})" if frozen else f"self.{one.name} = {value}")
    if calls_post_init:
        lines.append("self.__post_init__()")
    parameters = [*by_position, "*", *by_name] if by_name else by_position
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines), known)  # noqa: S102  (names of fields, no input)
    made: Callable[..., None] = known["__init__"]
    return made


def _repr(names: list[str]) -> Callable[[Any], str]:
    @recursive_repr("...")
    def shown(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return shown


def _comparing(cls: type, names: list[str], *, is_hashable: bool) -> dict[str, Any]:
    """``__eq__`` and ``__hash__``, by the values of the fields that are compared."""
    values: Callable[[Any], Any] = attrgetter(*names) if names else lambda _: ()

    def equal(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return (values(self),) == (values(other),)  # a NaN equals itself, as in the standard library's tuples

    def hashed(self: Any) -> int:
        return hash((cls, values(self)))

    return {"__eq__": equal, "__hash__": hashed if is_hashable else None}


def _refusing(cls: type, names: list[str]) -> dict[str, Any]:
    """What keeps an instance as it was made, and lets it be copied and pickled all the same."""
    slots = frozenset(names)

    def assign(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in slots:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        _put(self, name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is cls or name in slots:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    def state(self: Any) -> list[Any]:
        return [getattr(self, name) for name in names]

    def restore(self: Any, state: list[Any]) -> None:
        for name, value in zip(names, state, strict=True):
            _put(self, name, value)

    return {"__setattr__": assign, "__delattr__": delete, "__getstate__": state, "__setstate__": restore}
