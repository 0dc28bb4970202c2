"""What pydantic finds, in plain words: what is wanted and what was given."""

import re
from collections.abc import Callable
from typing import Any

from pydantic_core import ErrorDetails

from dtypedoctor.scenario.problems import quoted
from dtypedoctor.scenario.suggestions import did_you_mean

__all__ = ["allowed_words", "in_words"]

_DTYPE_WORDS = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "float": "float32", "fp32": "float32", "f32": "float32", "double": "float64", "fp64": "float64", "f64": "float64",
}  # fmt: skip
_NAME_WORDS = "small letters, digits, '.', '_' and '-', beginning with a letter or digit"


def in_words(error: ErrorDetails) -> str:
    """One error of pydantic as ``wants a whole number, got 'eight'``, without its place.

    Kinds of error that no scenario can cause today fall back to pydantic's own sentence.
    """
    words = _WORDS.get(error["type"])
    if words is None:
        return f"{error['msg']}, got {_given(error['input'])}"
    return words(error["input"], error.get("ctx", {}))


def allowed_words(error: ErrorDetails) -> list[str]:
    """The words that pydantic lists as allowed, for errors that list some."""
    return _listed(error.get("ctx", {}))


def _listed(context: dict[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", context.get("expected_tags", context.get("expected", "")))


def _given(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return repr(value)


_Words = Callable[[Any, dict[str, Any]], str]


def _wants(what: str) -> _Words:
    """A sentence about ``what``, in which pydantic's own word for a bound stands in braces."""

    def words(given: Any, context: dict[str, Any]) -> str:
        bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
        return f"wants {what.format(**bounds)}, got {_given(given)}"

    return words


def _wants_text(given: Any, context: dict[str, Any]) -> str:
    quotes = "; put it in quotes" if isinstance(given, int | float) else ""
    return f"wants text, got {_given(given)}{quotes}"


def _wants_one_of(given: Any, context: dict[str, Any]) -> str:
    allowed = _listed(context)
    meant = _DTYPE_WORDS.get(given.lower()) if isinstance(given, str) else None
    if meant in allowed:
        suggestion = f"; did you mean '{meant}'?"
    else:
        suggestion = did_you_mean(given, allowed) if isinstance(given, str) else ""
    return f"wants one of {', '.join(allowed)}, got {_given(given)}{suggestion}"


def _wants_more(given: Any, context: dict[str, Any]) -> str:
    least = context["min_length"]
    return f"wants at least {least} {'entry' if least == 1 else 'entries'}, got {context['actual_length']}"


def _wants_kind(given: Any, context: dict[str, Any]) -> str:
    return _wants_one_of(given.get("kind") if isinstance(given, dict) else given, context)


_WORDS: dict[str, _Words] = {
    "int_type": _wants("a whole number"),
    "float_type": _wants("a number"),
    "finite_number": _wants("a finite number"),
    "bool_type": _wants("true or false"),
    "string_type": _wants_text,
    "list_type": _wants("a list"),
    "dict_type": _wants("a mapping"),
    "model_type": _wants("a mapping"),
    "model_attributes_type": _wants("a mapping"),
    "literal_error": _wants_one_of,
    "union_tag_invalid": _wants_kind,
    "union_tag_not_found": lambda given, context: "the key 'kind' is missing",
    "missing": lambda given, context: "this key is missing",
    "greater_than_equal": _wants("at least {ge}"),
    "greater_than": _wants("more than {gt}"),
    "less_than_equal": _wants("at most {le}"),
    "less_than": _wants("less than {lt}"),
    "too_short": _wants_more,
    "string_too_long": _wants("at most {max_length} characters"),
    "string_pattern_mismatch": _wants(_NAME_WORDS),
    "value_error": lambda given, context: str(context["error"]),
}
