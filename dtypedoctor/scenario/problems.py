"""What is wrong with a file and where: pydantic's errors with what was given, and names that may be meant."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from dtypedoctor.errors import UsageError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails  # a script's process imports this module, and no pydantic

_LONGEST = 100
"""Characters of a name: nobody misspells an id into more, and comparing long texts takes quadratic time."""
_LONGEST_QUOTE = 60
_MOST_SHOWN = 100

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file down to a value."""
Mistake = tuple[int, int, str]
"""Line and column, both from 1, and what is wrong there, on one line."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """End a sentence with the choice that ``word`` most likely means, ``; did you mean 'seed'?``; empty where none is near."""
    if len(word) > _LONGEST:
        return ""
    folded = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(word.lower(), folded, n=1)
    return f"; did you mean '{folded[matches[0]]}'?" if matches else ""


def dotted(path: KeyPath) -> str:
    """Write a path as a person does: ``("steps", 0, "model")`` is ``steps[0].model``; empty for the whole file."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if part.isidentifier() and len(part) <= _LONGEST_QUOTE else quoted(part)
            text += f".{shown}" if text else shown
    return text


def quoted(text: str) -> str:
    """Put a text in quotes on one line, escaped where it does not print and shortened to 60 characters."""
    return repr(text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "…")


def printable(text: str | Path) -> str:
    """Escape what does not print in a text or path: line breaks, undecodable bytes of a file's name."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def refusal(path: Path, mistakes: Iterable[Mistake], hint: str) -> UsageError:
    """Make one error of all mistakes, one ``file:line:column: text`` a line in the order of the file, the first hundred of them."""
    ordered = sorted(set(mistakes))
    lines = [f"{printable(path)}:{line}:{column}: {text}" for line, column, text in ordered[:_MOST_SHOWN]]
    if len(ordered) > _MOST_SHOWN:
        lines.append(f"{printable(path)}: and {len(ordered) - _MOST_SHOWN} more mistakes")
    return UsageError("\n".join(lines), hint)


_OTHER_WORDS = {
    "gpu": "cuda", "nvidia": "cuda",
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "float": "float32", "fp32": "float32", "f32": "float32", "double": "float64", "fp64": "float64", "f64": "float64",
}  # fmt: skip


def in_words(error: "ErrorDetails") -> str:
    """Give pydantic's sentence, what was given instead, and the choice that may be meant."""
    given, context = error["input"], error.get("ctx", {})
    sentence = re.sub(r" or (instance of \w+|object to extract fields from)|^Value error, ", "", error["msg"])
    if error["type"] not in ("missing", "value_error", "union_tag_invalid", "union_tag_not_found"):
        shown = quoted(given) if isinstance(given, str) else repr(given) if isinstance(given, (int, float)) else ""
        sentence += f", got {shown}" if shown else ""
    choices = re.findall(r"'([^']*)'", context.get("expected_tags", context.get("expected", "")))
    word = str(context.get("tag", given))
    return sentence + did_you_mean(_OTHER_WORDS.get(word.lower(), word), choices)
