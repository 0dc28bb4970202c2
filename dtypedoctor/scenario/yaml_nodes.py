"""Reads YAML text into a tree in which every key and value knows its place.

The tree is built from PyYAML's events, so nothing is ever constructed, expanded or recursed into beyond a fixed depth.
Anchors, aliases, tags and merge keys are rejected: a scenario is plain keys and values. Unquoted words are read by the core
schema of YAML 1.2.2 (https://yaml.org/spec/1.2.2/#103-core-schema); PyYAML follows YAML 1.1, where ``1e-3`` is text, ``yes``
is true, ``010`` is eight and ``2026-04-01`` is a date.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from dtypedoctor.patterns import regex
from dtypedoctor.scenario.problems import KeyPath, Place, Problem, dotted, lines_of, printable, quoted
from dtypedoctor.values import dataclass

_DEEPEST = 32  # a scenario needs 6; `options` may nest further
_STANDARD = "tag:yaml.org,2002:"  # what PyYAML makes of `!!`
_CONTROL = regex(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(slots=True)
class Entry:
    """A key's place and its value."""

    key_place: Place
    node: "Node"


@dataclass(slots=True)
class Node:
    """A value with its place. ``readable`` is False where the value was refused and None stands in its stead."""

    place: Place
    value: "Scalar | list[Node] | dict[str, Entry]"
    readable: bool = True

    def plain(self) -> Any:
        """The value as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: entry.node.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def child(self, part: str | int) -> "Node | None":
        """The value under a key or at an index; None where there is none."""
        if isinstance(self.value, dict) and isinstance(part, str):
            entry = self.value.get(part)
            return entry.node if entry else None
        if isinstance(self.value, list) and isinstance(part, int) and 0 <= part < len(self.value):
            return self.value[part]
        return None

    def find(self, path: KeyPath) -> "Node | None":
        """The value at the end of a path; None where the path leads nowhere."""
        node: Node | None = self
        for part in path:
            node = node.child(part) if node else None
        return node


def read_tree(text: str) -> tuple[Node | None, list[Problem]]:
    """Reads the one document in ``text``, which must hold no characters that YAML forbids.

    Returns:
        The tree, or None where the text cannot be read to its end, and every mistake found on the way.
    """
    reader = _Reader(text)
    tree: Node | None = None
    try:
        tree = reader.document()
    except _UnreadableError as error:
        reader.problems.append(error.problem)
    except yaml.MarkedYAMLError as error:
        reader.problems.append(syntax_problem(error, text))
    except (ValueError, OverflowError):  # PyYAML leaves escapes beyond Unicode and huge version numbers to Python
        reader.problems.append(Problem(reader.here(), "not valid YAML: a number here is too large"))
    return tree, reader.problems


class _UnreadableError(Exception):
    """A mistake after which reading on makes no sense."""

    def __init__(self, place: Place, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(place, text)


class _Reader:
    def __init__(self, text: str) -> None:
        self._loader = yaml.SafeLoader(text)
        self._next: Callable[[], Any] = self._loader.get_event
        self.problems: list[Problem] = []

    def here(self) -> Place:
        return _place(self._loader.get_mark())

    def document(self) -> Node:
        self._next()  # the stream starts
        if self._loader.check_event(yaml.StreamEndEvent):
            raise _UnreadableError(Place(1, 1), "the file is empty")
        self._next()  # the document starts
        content = self._next()
        if isinstance(content, yaml.ScalarEvent) and not content.value:
            raise _UnreadableError(Place(1, 1), "the file is empty")
        tree = self._node((), content)
        self._next()  # the document ends
        if not self._loader.check_event(yaml.StreamEndEvent):
            second = self._next()
            raise _UnreadableError(
                _place(second.start_mark), "a second document starts here; a scenario file holds one"
            )
        return tree

    def _node(self, path: KeyPath, event: Any) -> Node:
        place = _place(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            self._note(place, path, f"aliases ({quoted(f'*{event.anchor}')}) are not accepted; write the value out")
            return Node(place, None, readable=False)
        if event.anchor is not None:
            self._note(place, path, f"anchors ({quoted(f'&{event.anchor}')}) are not accepted; leave it out")
        if event.tag is not None:
            self._note(
                place, path, f"tags ({quoted(event.tag.replace(_STANDARD, '!!'))}) are not accepted; leave it out"
            )
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(path, place, event)
        if len(path) >= _DEEPEST:
            raise _UnreadableError(place, f"nested deeper than {_DEEPEST} levels")
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path, place)
        return self._mapping(path, place)

    def _scalar(self, path: KeyPath, place: Place, event: Any) -> Node:
        word: str = event.value
        try:
            _refuse_control_characters(word)
            return Node(place, word if event.style else read_scalar(word))
        except ValueError as error:
            self._note(place, path, str(error))
            return Node(place, None, readable=False)

    def _sequence(self, path: KeyPath, place: Place) -> Node:
        items: list[Node] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._node((*path, len(items)), event))
        return Node(place, items)

    def _mapping(self, path: KeyPath, place: Place) -> Node:
        entries: dict[str, Entry] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key_place = _place(event.start_mark)
            key = self._key(path, key_place, event)
            value = self._node((*path, key or "?"), self._next())
            if key is None:
                continue
            if key in entries:
                self._note(key_place, (*path, key), f"duplicate key, first given at {entries[key].key_place}")
            else:
                entries[key] = Entry(key_place, value)
        return Node(place, entries)

    def _key(self, path: KeyPath, place: Place, event: Any) -> str | None:
        """The key as it is written, so that `yes` and `1` are texts; None where it cannot be one."""
        if not isinstance(event, yaml.ScalarEvent):
            self._node((*path, "?"), event)  # reads over it, and notes the mistakes inside
            self._note(place, path, "a key must be a word")
            return None
        if event.anchor is not None or event.tag is not None:
            self._note(place, path, "anchors and tags are not accepted on a key; leave them out")
        word: str = event.value
        if word == "<<":
            self._note(place, path, "merge keys (<<) are not accepted; write the keys out")
            return None
        if not word or not word.isprintable():
            self._note(place, path, f"a key must be a word, got {quoted(word)}")
            return None
        return word

    def _note(self, place: Place, path: KeyPath, text: str) -> None:
        self.problems.append(Problem(place, f"{dotted(path)}: {text}" if path else text))


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _refuse_control_characters(word: str) -> None:
    """Refuses what escapes such as ``"\\0"`` smuggle into a text: no file name, id or message can hold it."""
    match = _CONTROL.search(word)
    if match:
        raise ValueError(f"the text holds the character U+{ord(match[0]):04X}, which is not accepted")


Scalar = str | int | float | bool | None

PATTERNS: dict[str, re.Pattern[str]] = {
    "null": regex(r"(?:~|null|Null|NULL|)\Z"),
    "bool": regex(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": regex(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    "float": regex(
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
    raise ValueError(f"this integer is larger than {_LARGEST}")


def _finite(word: str) -> float:
    value = math.inf if word[-1].isalpha() else float(word)  # only `.inf` and `.nan` end with a letter
    if not math.isfinite(value):
        raise ValueError("this is not a finite number")
    return value


_NO_COLON = "could not find expected ':'"
_WORDS: tuple[tuple[str, str], ...] = (
    (r"found character '\\t' that cannot start", "a tab character; indent and separate with spaces"),
    (r"found character (.+) that cannot start", r"no value can start with \1; put the text in quotes"),
    (
        r"mapping values are not allowed",
        "a ':' where no key can stand; correct the indentation, or put the text in quotes",
    ),
    (_NO_COLON, "there is no ':' after the key"),
    (r"found unexpected end of stream", "the quoted text is never closed"),
    (r"found unexpected document separator", "the quoted text is never closed"),
    (r"expected ',' or '(.)'", r"a ',' or '\1' is missing"),
    (r"expected <block end>", "this does not line up with the lines above; correct the indentation"),
    (r"sequence entries are not allowed", "a '-' where no list can start; put the list on lines of its own"),
    (r"block sequence entries are not allowed", "a '-' where no list can start; put the list on lines of its own"),
    (r"found unknown escape character '(.+)'", r"unknown escape \\\1 in double quotes; use single quotes"),
    (r"expected the node content", "a value is missing"),
    (r"expected '<document start>'", "the value ended before this; correct the indentation, or put the text in quotes"),
)


def syntax_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    """Where reading ended and why. The place where an unclosed text, list or mapping starts is named."""
    problem = error.problem or "it cannot be read"
    mark = error.context_mark if problem.startswith(_NO_COLON) else error.problem_mark  # the key, not what follows it
    place = _place(mark) if mark else Place(1, 1)
    tab = _tab_in_indentation(text, place.line)
    if tab is not None:
        return Problem(tab, "a tab in the indentation; indent with spaces")
    words = _in_words(problem)
    start = error.context_mark
    if start is not None and start.line + 1 < place.line and not problem.startswith("expected <block end>"):
        words += f" (in what starts at {_place(start)})"
    return Problem(place, f"not valid YAML: {words}")


def _in_words(problem: str) -> str:
    for pattern, words in _WORDS:
        match = re.match(pattern, problem)
        if match:
            return match.expand(words)
    return printable(problem[:200].replace(r"'\x00'", "the end of the file"))


def _tab_in_indentation(text: str, line: int) -> Place | None:
    lines = lines_of(text)
    content = lines[line - 1] if line <= len(lines) else ""
    indentation = content[: len(content) - len(content.lstrip(" \t"))]
    return Place(line, indentation.index("\t") + 1) if "\t" in indentation else None
