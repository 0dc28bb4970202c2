"""What tokens look like, whoever issued them: gitleaks' table of services, and letters and digits that no name is made of.

The table is that of https://github.com/gitleaks/gitleaks (MIT), made by ``tools/gitleaks_rules.py``. A rule is compiled when a text
first holds one of its words, so that a process which has nothing to hide pays a search for words and nothing else.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dtypedoctor.unpatched import from_json

__all__ = ["SECRET", "without_shapes"]

SECRET = "<secret>"

_TABLE = Path(__file__).with_name("gitleaks.json")

_WORD = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9][A-Za-z0-9_+=-]{18,}")
"""What may be a token of a service that no table knows."""
_PREFIX = re.compile(r"[A-Za-z]{2,8}[0-9]?[-_](?=[A-Za-z0-9]{8})")
"""How many services begin their tokens."""
_HEX = re.compile(
    r"(?<![A-Za-z0-9])(?!sha|md5|blob|tree|commit|rev|git)[a-z][a-z0-9]{1,8}[-_](?:[a-z0-9]{1,6}[-_]){0,2}[0-9a-f]{32,}(?![A-Za-z0-9])"
)
"""Tokens with a prefix whose rest is hexadecimal."""
_RUN = re.compile(r"[a-z]{3,}")
_PIECE = 1 << 14
"""Characters that the rules look at together; their engine takes quadratic time for some texts."""
_BREAK = re.compile(r"\s")


def without_shapes(text: str) -> str:
    """``text`` with every token in it replaced."""
    return "".join(map(_without, _pieces(text)))


def _pieces(text: str) -> Iterator[str]:
    """The text, cut at spaces where it is long."""
    while len(text) > _PIECE:
        at = next((m.start() for m in _BREAK.finditer(text, _PIECE // 2, _PIECE)), _PIECE)
        yield text[:at]
        text = text[at:]
    yield text


def _without(text: str) -> str:
    low = text.lower()
    for number in {number for word, number in _words() if word in low}:
        pattern, group = _rule(number)
        text = pattern.sub(lambda match, group=group: _masked(match, group), text)  # type: ignore[misc]
    text = _HEX.sub(SECRET, text)
    return _WORD.sub(lambda match: SECRET if _is_random(match[0]) else match[0], text)


def _masked(match: re.Match[str], group: int) -> str:
    """The match without its secret: the group that holds it, else the first that holds anything, else all."""
    group = group or next((number for number, held in enumerate(match.groups(), start=1) if held), 0)
    begin, end = match.span(group)
    return match.string[match.start() : begin] + SECRET + match.string[end : match.end()]


@cache
def _document() -> list[dict[str, object]]:
    rules: list[dict[str, object]] = from_json(_TABLE.read_bytes())["rules"]
    return rules


@cache
def _words() -> tuple[tuple[str, int], ...]:
    """A word of which whatever a rule finds holds one, and the rule's number."""
    return tuple((str(word), number) for number, rule in enumerate(_document()) for word in _listed(rule["keywords"]))


@cache
def _rule(number: int) -> tuple[re.Pattern[str], int]:
    rule = _document()[number]
    return re.compile(str(rule["regex"]), re.ASCII), int(str(rule["group"]))


def _listed(value: object) -> Iterator[object]:
    yield from value if isinstance(value, list) else ()


def _is_random(word: str) -> bool:
    """Whether letters and digits follow each other as nobody would write them.

    Of 56,278 long names in the sources of torch, transformers, peft, trl and bitsandbytes one is taken for random. Of random texts 12%
    are not at 32 characters and 0.5% at 64; with a prefix, as most services have, 6% and 1%.
    """
    look = _Look(word)
    if len(look.kinds) < 20 or min(look.capitals, look.small) < 2:
        return False
    prefix = _PREFIX.match(word)
    body = _Look(word[prefix.end() :]) if prefix else None
    if body is not None and _is_varied(body):
        return body.readable < 0.36 and body.turns >= 0.4
    if look.digits >= 4:
        return look.readable < 0.4 and look.turns >= 0.42
    return look.digits >= 2 and look.readable < 0.22 and look.turns >= 0.45


def _is_varied(body: "_Look") -> bool:
    """Whether what follows a prefix is long enough, and of capitals, small letters and digits."""
    return len(body.kinds) >= 16 and min(body.capitals, body.small) >= 2 and body.digits > 0


class _Look:
    """Figures of a word: its letters and digits by kind, the share that stands in runs of small letters, and that of changes of kind."""

    def __init__(self, word: str) -> None:
        self.kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in word if c.isalnum()]
        self.digits, self.capitals, self.small = (self.kinds.count(kind) for kind in "dul")
        self.readable = sum(map(len, _RUN.findall(word))) / max(1, len(self.kinds))
        turns = sum(a != b for a, b in zip(self.kinds, self.kinds[1:], strict=False))
        self.turns = turns / max(1, len(self.kinds) - 1)
