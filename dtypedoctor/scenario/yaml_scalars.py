"""Which YAML words are numbers, booleans and nulls: the core schema of YAML 1.2.2, section 10.3.2.

PyYAML follows YAML 1.1, where ``1e-3`` is text, ``yes`` is true, ``010`` is eight and ``2026-04-01`` is a date.
Source: https://yaml.org/spec/1.2.2/#103-core-schema
"""

import math
import re

__all__ = ["PATTERNS", "Scalar", "read_scalar"]

Scalar = str | int | float | bool | None

PATTERNS: dict[str, re.Pattern[str]] = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
"""What an unquoted word must look like to be of each kind, in the order in which they are tried."""

_LARGEST = 2**63 - 1
_MOST_DIGITS = 25  # more never fit into 64 bits, and Python refuses to convert thousands of them


def read_scalar(word: str) -> Scalar:
    """The value of an unquoted word.

    Raises:
        ValueError: a whole number that does not fit into 64 bits, or a number that is not finite. The message says
            so in plain words.
    """
    if PATTERNS["null"].match(word):
        return None
    if PATTERNS["bool"].match(word):
        return word.lower() == "true"
    if PATTERNS["int"].match(word):
        return _whole(word)
    if PATTERNS["float"].match(word):
        return _finite(word)
    return word


def _whole(word: str) -> int:
    digits = word.lstrip("+-").lstrip("0") or "0"
    if len(digits) <= _MOST_DIGITS:
        base = {"0o": 8, "0x": 16}.get(word[:2], 10)
        value = int(word, base)
        if abs(value) <= _LARGEST:
            return value
    raise ValueError(f"this whole number is larger than {_LARGEST}")


def _finite(word: str) -> float:
    value = math.inf if word[-1].isalpha() else float(word)  # only `.inf` and `.nan` end with a letter
    if not math.isfinite(value):
        raise ValueError("this is not a finite number")
    return value
