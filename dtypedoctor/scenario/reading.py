"""Reads a scenario's YAML: PyYAML composes it with the place of each key and value, pydantic checks it, and each error gets its place.

Anchors, aliases, tags and merge keys are rejected: a scenario is plain keys and values. Unquoted words are read by the core
schema of YAML 1.2.2 (https://yaml.org/spec/1.2.2/#103-core-schema); PyYAML follows YAML 1.1, where ``1e-3`` is text, ``yes``
is true, ``010`` is eight and ``2026-04-01`` is a date.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from dtypedoctor.scenario.model import Name, Scenario, Strict
from dtypedoctor.scenario.problems import KeyPath, Place, Problem, did_you_mean, dotted, in_words, printable, quoted

PATTERNS: dict[str, re.Pattern[str]] = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
"""What an unquoted word must look like to be of each kind, in the order in which they are tried."""

_DEEPEST = 32
"""Levels of nesting: a scenario needs 6; `options` may nest further."""
_LARGEST = 2**63 - 1
_MOST_DIGITS = 25
"""More never fit into 64 bits, and Python refuses to convert thousands of them."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

_ID_LISTS: tuple[tuple[str, KeyPath], ...] = (
    ("finding", ("expect", "findings")),
    ("remedy", ("expect", "cured_by")),
    ("remedy", ("expect", "not_cured_by")),
    ("remedy", ("remedies",)),
)
"""Lists of ids in a scenario, with what they name."""


class _Composer(yaml.SafeLoader):
    """Composes nodes without following an alias, and no deeper than a scenario needs."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """See PyYAML.

        Raises:
            MarkedYAMLError: at what a scenario may not hold.
        """
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self._reject(f"aliases ({quoted(f'*{event.anchor}')}) are not accepted; write the value out")
        if event.anchor is not None:
            self._reject(f"anchors ({quoted(f'&{event.anchor}')}) are not accepted; leave it out")
        if event.tag is not None:
            self._reject(f"tags ({quoted(event.tag)}) are not accepted; leave it out")
        if self.depth > _DEEPEST:
            self._reject(f"nested deeper than {_DEEPEST} levels")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def _reject(self, why: str) -> None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        raise yaml.MarkedYAMLError(problem=why, problem_mark=event.start_mark)


class _Content:
    """The plain values of a file, and the place of each key and value by its path."""

    def __init__(self, node: yaml.Node) -> None:
        self.places: dict[KeyPath, Place] = {}
        self.keys: dict[KeyPath, Place] = {}
        self.problems: list[Problem] = []
        self.unreadable: set[KeyPath] = set()
        self.values = self._plain(node, ())

    def at(self, path: KeyPath) -> Any:
        """The value at ``path``; None where there is none."""
        value = self.values
        for part in path:
            inside = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
            if not inside:
                return None
            value = value[part]
        return value

    def _plain(self, node: yaml.Node, path: KeyPath) -> Any:
        self.places[path] = _place(node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path))
        try:
            return _read_scalar(node)
        except ValueError as error:
            self._note(node, path, str(error))
            self.unreadable.add(path)
            return None

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        for key, value in node.value:
            word = key.value
            if word == "<<" and isinstance(key, yaml.ScalarNode):
                self._note(key, path, "merge keys (<<) are not accepted; write the keys out")
            elif not isinstance(key, yaml.ScalarNode) or not word or not word.isprintable():
                self._note(
                    key, path, "a key must be a word" + (f", got {quoted(word)}" if isinstance(word, str) else "")
                )
            elif (*path, word) in self.keys:
                self._note(key, (*path, word), f"duplicate key, first given at {self.keys[*path, word]}")
            else:
                self.keys[*path, word] = _place(key.start_mark)
                yield word, self._plain(value, (*path, word))

    def _note(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        self.problems.append(Problem(_place(node.start_mark), f"{dotted(path)}: {text}" if path else text))


def read_scenario(text: str, stem: str, known: Mapping[str, Collection[str]]) -> tuple[Scenario | None, list[Problem]]:
    """Read the one document in ``text``, which must hold no characters that YAML forbids.

    Args:
        text: the content of a file.
        stem: its name without the ending, which must be the scenario's name.
        known: all ids by what they name: ``finding``, ``remedy``, ``correction``. What is left out is checked for its form only.

    Returns:
        The scenario, or None where it is none, and every mistake that was found.
    """
    try:
        node = yaml.compose(text, Loader=_Composer)
    except yaml.MarkedYAMLError as error:
        return None, [_syntax_problem(error)]
    except (ValueError, OverflowError):  # PyYAML leaves escapes beyond Unicode and huge version numbers to Python
        return None, [Problem(Place(1, 1), "not valid YAML: a number here is too large")]
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return None, [Problem(Place(1, 1), "the file is empty")]
    content = _Content(node)
    problems = [*content.problems, *_about_name(content, stem), *_about_ids(content, known)]
    try:
        return Scenario.model_validate(content.values), problems
    except ValidationError as refused:
        told = {problem.place for problem in problems}
        found = _described(content, refused.errors(include_url=False))
        return None, problems + [problem for problem in found if problem.place not in told]


def _described(content: _Content, errors: list[ErrorDetails]) -> list[Problem]:
    """Each error in words at its place; a misspelt key is not called missing as well."""
    problems, meant = [], set()
    for error in errors:
        path = _path_in_file(content, error["loc"])
        if error["type"] == "extra_forbidden":
            suggestion = did_you_mean(str(path[-1]), _keys_beside(str(path[-1]), content.at(path[:-1]).keys()))
            meant.add((*path[:-1], suggestion[len("; did you mean '") : -len("'?")]))
            problems.append(Problem(content.keys[path], f"{dotted(path)}: unknown key{suggestion}"))
    for error in errors:
        path = _path_in_file(content, error["loc"])
        if error["type"] == "missing":
            path = (*path, error["loc"][-1])
        if error["type"] == "union_tag_invalid":
            path = (*path, "kind")
        if error["type"] == "extra_forbidden" or path in meant or path in content.unreadable:
            continue
        place = next(content.places[path[:end]] for end in range(len(path), -1, -1) if path[:end] in content.places)
        words = in_words(error)
        problems.append(Problem(place, f"{dotted(path)}: {words}" if path else f"a scenario {words}"))
    return problems


def _path_in_file(content: _Content, location: KeyPath) -> KeyPath:
    """pydantic's path without the kind of a workload, by which it tells the parts of a union apart and which is no key in the file."""
    path: KeyPath = ()
    for part in location:
        if (*path, part) in content.places:
            path = (*path, part)
    return path


def _keys_beside(key: str, siblings: AbstractSet[str]) -> Collection[str]:
    """The keys that ``key`` may mean: those of the parts of a scenario that have most of its siblings."""
    parts = [part.model_fields.keys() for part in _parts(Strict)]
    shared = [len(keys & (siblings - {key})) for keys in parts]
    likely = {name for keys, many in zip(parts, shared, strict=True) if many == max(shared) for name in keys}
    return likely - {key}


def _parts(part: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in part.__subclasses__():
        yield below
        yield from _parts(below)


def _about_name(content: _Content, stem: str) -> Iterator[Problem]:
    """The scenario's name must be that of its file."""
    name = content.at(("name",))
    if not isinstance(name, str) or name == stem:
        return
    text = f"name: must be {quoted(stem)}, the file's name, got {quoted(name)}"
    try:
        TypeAdapter(Name).validate_python(stem)
    except ValidationError:
        text = f"name: must be the file's name, but {quoted(stem)} cannot be one; rename the file"
    yield Problem(content.places["name",], text)


def _about_ids(content: _Content, known: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Ids that nothing in the program has."""

    def items(path: KeyPath) -> range:
        values = content.at(path)
        return range(len(values)) if isinstance(values, list) else range(0)

    named = [(what, (*path, number)) for what, path in _ID_LISTS for number in items(path)]
    named += [("correction", ("corrections", number, "id")) for number in items(("corrections",))]
    for what, path in named:
        value, ids = content.at(path), known.get(what)
        if isinstance(value, str) and ids is not None and value not in ids:
            text = f"no {what} has the id {quoted(value)}{did_you_mean(value, ids)}"
            yield Problem(content.places[path], f"{dotted(path)}: {text}")


def _syntax_problem(error: yaml.MarkedYAMLError) -> Problem:
    """Where reading ended and why, in PyYAML's words."""
    mark, start = error.problem_mark, error.context_mark
    why = printable(str(error.problem)[:200].replace(r"'\x00'", "the end of the file"))
    if error.context and start is not None and mark is not None and start.line < mark.line:
        why += f" ({error.context} that starts at {_place(start)})"
    own = error.context is None and why.endswith(("leave it out", "write the value out", f"{_DEEPEST} levels"))
    return Problem(_place(mark) if mark else Place(1, 1), why if own else f"not valid YAML: {why}")


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _read_scalar(node: Any) -> str | int | float | bool | None:
    """The value of a word.

    Raises:
        ValueError: it holds a character that no file name, id or message can hold, is a whole number that does not fit into 64 bits, or a
            number that is not finite. The message says so in plain words.
    """
    word: str = node.value
    if match := _CONTROL.search(word):
        raise ValueError(f"the text holds the character U+{ord(match[0]):04X}, which is not accepted")
    if node.style or not any(pattern.match(word) for pattern in PATTERNS.values()):
        return word
    if PATTERNS["null"].match(word):
        return None
    if PATTERNS["bool"].match(word):
        return word.lower() == "true"
    if PATTERNS["int"].match(word):
        digits = word.lstrip("+-").lstrip("0") or "0"
        value = int(word, {"0o": 8, "0x": 16}.get(word[:2], 10)) if len(digits) <= _MOST_DIGITS else _LARGEST + 1
        if abs(value) > _LARGEST:
            raise ValueError(f"this integer is larger than {_LARGEST}")
        return value
    number = math.inf if word[-1].isalpha() else float(word)  # only `.inf` and `.nan` end with a letter
    if not math.isfinite(number):
        raise ValueError("this is not a finite number")
    return number
