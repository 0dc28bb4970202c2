"""What is wrong with a file and where: positions, pydantic's errors in plain words, and names that may be meant."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dtypedoctor.errors import UsageError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails  # a script's process imports this module, and no pydantic

# Nobody misspells an id into more than this, and comparing long texts takes quadratic time.
_LONGEST = 100


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that ``word`` most likely means; None where nothing is near. Upper and lower case are alike."""
    if len(word) > _LONGEST:
        return None
    folded = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(word.lower(), folded, n=1)
    return folded[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of a sentence, ``; did you mean 'seed'?``, or an empty text where nothing is near."""
    match = closest(word, choices)
    return f"; did you mean '{match}'?" if match else ""


KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file down to a value."""

_MOST_SHOWN = 100
_LONGEST_QUOTE = 60
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # those at which PyYAML counts a new line


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in a text. Line and column count from 1, the column in characters."""

    line: int
    column: int

    @classmethod
    def after(cls, text: str) -> Self:
        """The place of the character that follows ``text``."""
        lines = lines_of(text)
        return cls(len(lines), len(lines[-1]) + 1)

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake: its place and what is wrong, in plain words on one line."""

    place: Place
    text: str


def lines_of(text: str) -> list[str]:
    """The text's lines as YAML counts them; one empty line for an empty text."""
    return _LINE_BREAK.split(text)


def dotted(path: KeyPath) -> str:
    """The path as a person writes it: ``("steps", 0, "model")`` is ``steps[0].model``; empty for the whole file."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (
                part if part.isidentifier() and len(part) <= _LONGEST_QUOTE else quoted(part)
            )
    return text


def quoted(text: str) -> str:
    """The text in quotes on one line, escaped where it does not print and shortened to 60 characters."""
    return repr(text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "…")


def printable(text: str | Path) -> str:
    """The text or path with whatever does not print (line breaks, undecodable bytes of a file name) escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def refusal(path: Path, problems: Iterable[Problem], hint: str) -> UsageError:
    """One error that names all problems in the order of their places, one ``file:line:column: text`` a line.

    After the first 100 only the number of the others is said.
    """
    ordered = sorted(set(problems))
    lines = [f"{printable(path)}:{problem.place}: {problem.text}" for problem in ordered[:_MOST_SHOWN]]
    if len(ordered) > _MOST_SHOWN:
        lines.append(f"{printable(path)}: and {len(ordered) - _MOST_SHOWN} more mistakes")
    return UsageError("\n".join(lines), hint)


_OTHER_WORDS = {
    "gpu": "cuda", "nvidia": "cuda",
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "float": "float32", "fp32": "float32", "f32": "float32", "double": "float64", "fp64": "float64", "f64": "float64",
}  # fmt: skip
_NAME_WORDS = "lowercase letters, digits, '.', '_' and '-', beginning with a letter or digit"


def in_words(error: "ErrorDetails") -> str:
    """One error of pydantic as ``must be an integer, got 'eight'``, without its place.

    Kinds of error that no scenario can cause today fall back to pydantic's own sentence.
    """
    words = _WORDS.get(error["type"])
    if words is None:
        return f"{error['msg']}, got {_given(error['input'])}"
    return words(error["input"], error.get("ctx", {}))


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


def _must_be(what: str) -> _Words:
    """A sentence about ``what``, in which pydantic's own word for a bound stands in braces."""

    def words(given: Any, context: dict[str, Any]) -> str:
        bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
        return f"must be {what.format(**bounds)}, got {_given(given)}"

    return words


def _must_be_text(given: Any, context: dict[str, Any]) -> str:
    quotes = "; put it in quotes" if isinstance(given, int | float) else ""
    return f"must be text, got {_given(given)}{quotes}"


def _must_be_one_of(given: Any, context: dict[str, Any]) -> str:
    allowed = _listed(context)
    meant = _OTHER_WORDS.get(given.lower()) if isinstance(given, str) else None
    if meant in allowed:
        suggestion = f"; did you mean '{meant}'?"
    else:
        suggestion = did_you_mean(given, allowed) if isinstance(given, str) else ""
    return f"must be one of {', '.join(allowed)}, got {_given(given)}{suggestion}"


def _must_have_more(given: Any, context: dict[str, Any]) -> str:
    least = context["min_length"]
    return f"must have at least {least} {'entry' if least == 1 else 'entries'}, got {context['actual_length']}"


def _must_be_kind(given: Any, context: dict[str, Any]) -> str:
    return _must_be_one_of(given.get("kind") if isinstance(given, dict) else given, context)


_WORDS: dict[str, _Words] = {
    "int_type": _must_be("an integer"),
    "float_type": _must_be("a number"),
    "finite_number": _must_be("a finite number"),
    "bool_type": _must_be("true or false"),
    "string_type": _must_be_text,
    "list_type": _must_be("a list"),
    "dict_type": _must_be("a mapping"),
    "model_type": _must_be("a mapping"),
    "model_attributes_type": _must_be("a mapping"),
    "literal_error": _must_be_one_of,
    "union_tag_invalid": _must_be_kind,
    "union_tag_not_found": lambda given, context: "the key 'kind' is missing",
    "missing": lambda given, context: "this key is missing",
    "greater_than_equal": _must_be("at least {ge}"),
    "greater_than": _must_be("more than {gt}"),
    "less_than_equal": _must_be("at most {le}"),
    "less_than": _must_be("less than {lt}"),
    "too_short": _must_have_more,
    "string_too_long": _must_be("at most {max_length} characters"),
    "string_pattern_mismatch": _must_be(_NAME_WORDS),
    "value_error": lambda given, context: str(context["error"]),
}
