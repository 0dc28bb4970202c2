"""The codec between records and the lines of a trace, and every kind of observation that specialised instruments make.

:func:`decode` makes a record of decoded JSON and rejects values of a type that the record does not have. What instruments observe is
a frozen dataclass of ``execution`` or ``silent``, which names its kind on disk in ``KIND``; a field whose name is a
keyword of Python ends in ``_``, which is left out on disk. Instruments make these and detectors read them, so nothing here knows
either side. A record of a kind that is not listed here, or that lacks a field, stays a raw :class:`~dtypedoctor.trace.events.Observation`.
"""

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from keyword import iskeyword
from typing import Any, Union, cast, get_args, get_origin

from dtypedoctor.plugins import Check, registered
from dtypedoctor.trace.events import Observation, Observed
from dtypedoctor.trace.records import execution, silent

LARGEST = 2**63
"""No count, number or size in a trace reaches this."""

_Check = Callable[[Any], bool]
_Plan = tuple[tuple[str, Callable[[Any], Any] | None, _Check, Callable[[], Any] | None], ...]
_PLANS: dict[type[Any], _Plan] = {}
"""For each field of a class its name, what makes records of a value that holds some, whether a value fits, and what stands for one
that is not there."""
_EMPTY: dict[Any, Callable[[], Any]] = {str: str, bool: bool}
"""The writer leaves out empty values; these are put back for fields without a default of their own."""


def decode(kind: type[Any], value: Mapping[str, Any]) -> Any:
    """The record of class ``kind`` with these values; fields that the class does not know are passed over.

    Raises:
        ValueError, TypeError: a field is missing, or its value has the wrong type.
    """
    arguments = {}
    for name, nested, fits, empty in _plan(kind):
        if name in value:
            arguments[name] = value[name] if nested is None else nested(value[name])
            if not fits(arguments[name]):
                raise ValueError(f"{name} has the wrong type")
        elif empty is not None:
            arguments[name] = empty()
    return kind(**arguments)


def _nested(hint: Any) -> Callable[[Any], Any] | None:
    """What makes records of a value with this type; None where it holds none."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return lambda value: decode(cast(type[Any], hint), value)
    if origin in (Union, types.UnionType):
        within = next(filter(None, map(_nested, inner)), None)
        return None if within is None else lambda value: None if value is None else within(value)
    if origin is list and (of_item := _nested(inner[0])) is not None:
        return lambda values: [of_item(value) for value in values]
    return _nested_in_mapping(hint)


def _nested_in_mapping(hint: Any) -> Callable[[Any], Any] | None:
    """The same for the values of a mapping."""
    origin, inner = get_origin(hint), get_args(hint)
    if not isinstance(origin, type) or not issubclass(origin, Mapping):
        return None
    of_value = _nested(inner[1])
    if of_value is None:
        return None
    return lambda values: {name: of_value(value) for name, value in values.items()}


def _plan(kind: type[Any]) -> _Plan:
    found = _PLANS.get(kind)
    if found is None:
        hints = typing.get_type_hints(kind)
        found = _PLANS[kind] = tuple(
            (f.name, _nested(hints[f.name]), _check(hints[f.name]), _empty_of(f, hints[f.name])) for f in fields(kind)
        )
    return found


def _empty_of(field: Any, hint: Any) -> Callable[[], Any] | None:
    if field.default is not MISSING or field.default_factory is not MISSING:
        return None
    if type(None) in get_args(hint):
        return lambda: None
    return list if get_origin(hint) is list else _EMPTY.get(hint)


def _check(hint: Any) -> _Check:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        checks = [_check(part) for part in inner]
        return lambda value: any(check(value) for check in checks)
    if origin is list:
        item = _check(inner[0])
        return lambda value: type(value) is list and all(map(item, value))
    if origin is not None and issubclass(origin, Mapping):
        of = _check(inner[1])
        return lambda value: type(value) is dict and all(map(of, value.values()))
    return lambda value: isinstance(value, hint)


def _is_int(value: Any) -> bool:
    return type(value) is int and -LARGEST < value < LARGEST


def _is_number(value: Any) -> bool:
    return _is_int(value) or (type(value) is float and math.isfinite(value))


def _is_json(value: Any) -> bool:
    """Any JSON but numbers that are too large, at any depth."""
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return _is_number(value) if type(value) in (int, float) else True


_PLAIN: dict[Any, _Check] = {
    Any: _is_json,
    int: _is_int,
    float: _is_number,
    str: lambda value: type(value) is str,
    bool: lambda value: type(value) is bool,
    type(None): lambda value: value is None,
}


RECORDS: dict[str, type[Any]] = {
    record.KIND: record for module in (execution, silent) for record in vars(module).values() if hasattr(record, "KIND")
}
"""Every record by its kind. A class with a ``KIND`` in one of these modules is one."""


def from_disk(raw: Observation) -> Observation | Observed[Any]:
    """The typed observation; ``raw`` itself where its kind is unknown, or its values are not those of the kind."""
    record = RECORDS.get(raw.kind)
    if record is None:  # it may be that of a plug-in
        others = (record for check in registered(Check).values() for record in check.records)
        record = next((one for one in others if getattr(one, "KIND", None) == raw.kind), None)
    if record is None:
        return raw
    try:
        what = decode(record, {f"{name}_" if iskeyword(name) else name: value for name, value in raw.values.items()})
    except (TypeError, ValueError):
        return raw
    # older traces leave an empty name out of the coordinates, and repeat it among the values
    fqn = raw.values.get("fqn", raw.fqn)
    return Observed(n=raw.n, step=raw.step, call=raw.call, phase=raw.phase, what=what, fqn=fqn)


def to_disk(observed: Observed[Any]) -> Observation:
    """The observation as it is written."""
    what = observed.what
    values = {name.removesuffix("_"): value for name, value in asdict(what).items()}
    return Observation(n=observed.n, step=observed.step, call=observed.call, phase=observed.phase, kind=what.KIND,
                       values=values, fqn=observed.fqn)  # fmt: skip
