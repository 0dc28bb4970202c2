"""Writes the lists of keys in ``docs/scenario-keys.md`` from the scenario's model.

    python tools/scenario_tables.py

Each list stands under a heading with the part's name, behind what the page says of the part.
"""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dtypedoctor.lab.scenarios.model import FixName, Name, ReleaseBound, Scenario

DTYPES = ("float16", "bfloat16", "float32", "float64")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "scenario-keys.md"


def key_lists() -> dict[str, str]:
    """A Markdown list of its keys for each part of a scenario, by the part's name, from the outside in."""
    said: dict[str, str] = {}
    return {part.__name__: _list(part, said) for part in _parts(Scenario, set())}


def with_lists(page: str) -> str:
    """The text of the page with every list made anew.

    Raises:
        ValueError: a part has no heading, or a heading names no part.
    """
    intro, *sections = page.split("\n## ")
    lists = key_lists()
    if [section.partition("\n")[0] for section in sections] != list(lists):
        raise ValueError(f"the headings of the page have to be {', '.join(lists)}")
    parts = [intro.rstrip()]
    for section, keys in zip(sections, lists.values(), strict=True):
        prose = "\n".join(line for line in section.splitlines() if not line.startswith("- `")).rstrip()
        parts.append(f"## {prose}\n\n{keys}".rstrip())
    return "\n\n".join(parts) + "\n"


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


def _list(part: type[BaseModel], said: dict[str, str]) -> str:
    """A line for each key; one line for those of which ``said``, lines by the part that has them, holds the same."""
    lines: list[str] = []
    shared: dict[str, list[str]] = {}
    for key, field in part.model_fields.items():
        if key == "kind" and field.is_required():
            continue
        line = f"- `{key}` ({_kind(field)}): {field.description}"
        if line in said:
            shared.setdefault(said[line], []).append(f"`{key}`")
        else:
            said[line] = part.__name__
            lines.append(line)
    lines += [f"- {', '.join(keys)}: as of [{other}](#{other.lower()})." for other, keys in shared.items()]
    return "\n".join(lines)


def _kind(field: FieldInfo) -> str:
    """Its values and its default; a Boolean's default says both, and what is empty or null if left out needs no default."""
    default = _default(field)
    if field.annotation is bool:
        return default
    return _value(field) if default in ("none", "empty") else f"{_value(field)}; {default}"


def _value(field: FieldInfo) -> str:
    if any(hasattr(constraint, "pattern") for constraint in field.metadata):
        return "a name"
    optional = NoneType in get_args(field.annotation) and field.default is not None
    return _type(field.annotation) + _limits(field) + (", or `null`" if optional else "")


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return "a name" if annotation in (Name, FixName) else _type(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not NoneType)
    if origin is Literal:
        if arguments == DTYPES:
            return "a dtype"
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"a list of {_PLURALS.get(arguments[0], _type(arguments[0]))}"
    return _WORDS.get(annotation, "a mapping") if _is_no_part(annotation) else _link(annotation)


def _is_no_part(annotation: Any) -> bool:
    return not isinstance(annotation, type) or not issubclass(annotation, BaseModel)


def _link(part: type[BaseModel]) -> str:
    return f"[{part.__name__}](#{part.__name__.lower()})"


_WORDS: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "`true` or `false`"}
_PLURALS: dict[Any, str] = {str: "texts", ReleaseBound: "releases with a bound", Name: "names", FixName: "names"}


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


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
