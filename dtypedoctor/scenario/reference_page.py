"""The tables of ``docs/scenarios.md``: every key of every part of a scenario, from the model itself."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dtypedoctor.scenario.model import Name, Scenario

__all__ = ["key_tables"]


def key_tables() -> dict[str, str]:
    """A Markdown table of its keys for each part of a scenario, by the part's name, from the outside in."""
    return {part.__name__: _table(part) for part in _parts(Scenario, set())}


def _parts(part: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if part in seen:
        return
    seen.add(part)
    yield part
    for field in part.model_fields.values():
        for inner in _models_in(field.annotation):
            yield from _parts(inner, seen)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _table(part: type[BaseModel]) -> str:
    rows = ["| key | wants | if left out | meaning |", "|---|---|---|---|"]
    for key, field in sorted(part.model_fields.items(), key=lambda item: item[0] != "kind"):
        rows.append(f"| `{key}` | {_wanted(field)} | {_default(field)} | {field.description} |")
    return "\n".join(rows)


def _wanted(field: FieldInfo) -> str:
    if any(hasattr(constraint, "pattern") for constraint in field.metadata):
        return "a name"
    optional = NoneType in get_args(field.annotation) and field.default is not None
    return _wants(field.annotation) + _limits(field) + (", or `null`" if optional else "")


def _wants(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return "a name" if annotation == Name else _wants(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_wants(argument) for argument in arguments if argument is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"a list of {_PLURALS.get(arguments[0], _wants(arguments[0]))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return _WORDS.get(annotation, "a mapping")


_WORDS: dict[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "`true` or `false`"}
_PLURALS: dict[Any, str] = {str: "texts", Name: "names"}


def _limits(field: FieldInfo) -> str:
    words = []
    for limit in field.metadata:
        match limit:
            case annotated_types.Ge(ge=least):
                words.append(f"at least {least}")
            case annotated_types.Gt(gt=bound):
                words.append(f"more than {bound}")
            case annotated_types.Le(le=most):
                words.append(f"at most {most}")
            case annotated_types.Lt(lt=bound):
                words.append(f"less than {bound}")
            case annotated_types.MinLen(min_length=least):
                words.append(f"at least {least} of them")
    return "".join(f", {word}" for word in words)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | dict):
        return f"`[{', '.join(value)}]`" if value else "empty"
    return f"`{value}`"
