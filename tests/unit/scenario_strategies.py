"""Hypothesis strategies for scenarios, made from the model, so that a new key is covered without another line."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dtypedoctor.scenario.model import OVERHEAD_BUDGET, FixName, Model, Name, ReleaseBound, Scenario, Script

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.just("\n"), max_size=40) | st.sampled_from(
    [
        "",
        "1e-3",
        "yes",
        "null",
        "~",
        "010",
        "0x1f",
        "2026-04-01",
        "true",
        "- a",
        "a: b",
        "#",
        "'",
        '"',
        "1.",
        ".inf",
        "<<",
    ]
)
NAMES = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)
BUDGET = get_args(OVERHEAD_BUDGET)[1].metadata[0].pattern
KEYS = TEXTS.filter(lambda text: bool(text) and text.isprintable() and text != "<<")
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def scenarios() -> st.SearchStrategy[Scenario]:
    """Scenarios with any values that their keys accept."""
    return (
        _part(Scenario)
        .map(_with_scripts_alone)
        .flatmap(_with_a_first_model)
        .map(_distributed_where_it_can_be)
        .map(Scenario.model_validate)
    )


def _distributed_where_it_can_be(values: dict[str, Any]) -> dict[str, Any]:
    one_process = any(
        step["workload"]["kind"] not in ("train", "forward", "script")
        or step.get("compile") is not None
        or (step.get("model") or {}).get("device_map") is not None
        or (step.get("model") is None and step["workload"]["kind"] != "script")
        for step in values["steps"]
    )
    return {key: value for key, value in values.items() if key != "distributed" or not one_process}


def _with_scripts_alone(values: dict[str, Any]) -> dict[str, Any]:
    first, *others = values["steps"]
    if first["workload"]["kind"] == "script":
        steps = [{key: first[key] for key in ("name", "workload") if key in first}]
        return {key: value for key, value in values.items() if key != "reference"} | {"steps": steps}
    return values | {"steps": [first, *(step for step in others if step["workload"]["kind"] != "script")]}


def _with_a_first_model(values: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    first, *others = values["steps"]
    if first.get("model") is not None or first["workload"]["kind"] == "script":
        return st.just(values)
    return _part(Model).map(lambda model: values | {"steps": [first | {"model": model}, *others]})


def _part(part: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {key: _values(field.annotation, _limits(field)) for key, field in part.model_fields.items()}
    required = {key: value for key, value in fields.items() if part.model_fields[key].is_required()}
    optional = {key: value for key, value in fields.items() if key not in required}
    values: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(required, optional=optional)
    return values.map(_one_target) if part is Script else values


def _one_target(script: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in script.items() if key not in ("path", "module", "code")}
    for target in ("code", "path"):
        if script.get(target) is not None:
            return others | {target: script[target]}
    return others | {"module": script.get("module") or "package.module"}


def _values(wanted: Any, limits: dict[str, Any]) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if limits.get("pattern") == BUDGET:
        return st.from_regex(BUDGET.replace("$", ""), fullmatch=True)
    if wanted is ReleaseBound:
        return st.from_regex(r"[a-z]{1,8}(<|>=)[0-9](\.[0-9])?", fullmatch=True)
    if wanted in (Name, FixName) or "pattern" in limits:
        return NAMES
    if origin is Annotated:
        return _values(arguments[0], limits)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of(*(_values(argument, limits) for argument in arguments))
    if origin is list:
        return st.lists(_values(arguments[0], {}), min_size=limits.get("min_length", 0), max_size=3)
    if origin is dict:
        return st.dictionaries(KEYS, PLAIN, max_size=3)
    if issubclass(wanted, BaseModel):
        return _part(wanted)
    return _scalars(wanted, limits)


def _scalars(wanted: type, limits: dict[str, Any]) -> st.SearchStrategy[Any]:
    if wanted is NoneType:
        return st.none()
    if wanted is bool:
        return st.booleans()
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    if wanted is int:
        return st.integers(0 if low is None else low, 2**63 - 1 if high is None else high - ("lt" in limits))
    if wanted is float:
        return st.floats(low, high, exclude_min="gt" in limits, exclude_max="lt" in limits,
                         allow_nan=False, allow_infinity=False)  # fmt: skip
    assert wanted is str
    return TEXTS


def _limits(field: FieldInfo) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for constraint in field.metadata:
        if hasattr(constraint, "pattern"):
            found["pattern"] = constraint.pattern
        for kind, name in (
            (annotated_types.Ge, "ge"),
            (annotated_types.Gt, "gt"),
            (annotated_types.Le, "le"),
            (annotated_types.Lt, "lt"),
            (annotated_types.MinLen, "min_length"),
        ):
            if isinstance(constraint, kind):
                found[name] = getattr(constraint, name)
    return found
