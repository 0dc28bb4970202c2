"""Writes a scenario as YAML, and what a scenario may hold as JSON Schema and as the tables of docs/scenarios.md."""

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dtypedoctor.scenario.model import Name, Scenario
from dtypedoctor.scenario.yaml_nodes import PATTERNS


def to_yaml(scenario: Scenario) -> str:
    """The shortest YAML that ``load_scenario`` reads back as an equal scenario: keys at their default are left out.

    Texts must be free of control characters and ``options`` must hold YAML's own kinds of values only, as those of every
    loaded scenario do.
    """
    values = scenario.model_dump(exclude_defaults=True)
    for step in values["steps"]:
        step["workload"] = {"kind": step["workload"]["kind"]} | step["workload"]  # what is done stands first
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes what the core schema would read as something else than text."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {  # noqa: RUF012  (PyYAML's own name)
        None: [(f"tag:yaml.org,2002:{kind}", pattern) for kind, pattern in PATTERNS.items()]
    }


def json_schema() -> dict[str, Any]:
    """The schema in draft 2020-12, with each key's description and default.

    It accepts every file that ``load_scenario`` accepts. It cannot say what depends on several keys (a script has either
    ``path`` or ``module``; the name is the file's), so the loader has the last word.
    """
    schema = Scenario.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "dtypedoctor scenario",
    }


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
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in sorted(part.model_fields.items(), key=lambda item: item[0] != "kind"):
        rows.append(f"| `{key}` | {_value(field)} | {_default(field)} | {field.description} |")
    return "\n".join(rows)


def _value(field: FieldInfo) -> str:
    if any(hasattr(constraint, "pattern") for constraint in field.metadata):
        return "a name"
    optional = NoneType in get_args(field.annotation) and field.default is not None
    return _type(field.annotation) + _limits(field) + (", or `null`" if optional else "")


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return "a name" if annotation == Name else _type(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"a list of {_PLURALS.get(arguments[0], _type(arguments[0]))}"
    return _WORDS.get(annotation, "a mapping") if _is_no_part(annotation) else _link(annotation)


def _is_no_part(annotation: Any) -> bool:
    return not isinstance(annotation, type) or not issubclass(annotation, BaseModel)


def _link(part: type[BaseModel]) -> str:
    return f"[{part.__name__}](#{part.__name__.lower()})"


_WORDS: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "`true` or `false`"}
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
