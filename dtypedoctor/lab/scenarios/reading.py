"""Reads a scenario's YAML: PyYAML composes it with the place of each key and value, pydantic checks it, and each error gets its place.

Anchors, aliases, tags and merge keys are rejected: a scenario is plain keys and values. Unquoted words are read by the core
schema of YAML 1.2.2 (https://yaml.org/spec/1.2.2/#103-core-schema); PyYAML follows YAML 1.1, where ``1e-3`` is text, ``yes``
is true, ``010`` is eight and ``2026-04-01`` is a date.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.reader import ReaderError

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.model import Scenario, Strict
from dtypedoctor.text import QUOTE_LIMIT, did_you_mean, printable, quoted

PATTERNS: dict[str, re.Pattern[str]] = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"[-+]?[0-9]+\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
"""What an unquoted word must look like to be of each kind, in the order in which they are tried."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_DEEPEST = 32
"""Levels of nesting: a scenario needs 6; `options` may nest further."""
_MOST_SHOWN = 100

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file down to a value."""
Mistake = tuple[int, int, str]
"""Line and column, both from 1, and what is wrong there, on one line."""


class _Loader(yaml.SafeLoader):
    """Resolves words by the core schema, follows no alias, and goes no deeper than a scenario needs."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own name)
        None: [(f"tag:yaml.org,2002:{kind}", pattern) for kind, pattern in PATTERNS.items()]
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one node; see PyYAML.

        Raises:
            MarkedYAMLError: at what a scenario may not hold.
        """
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None or event.tag is not None:
            raise yaml.MarkedYAMLError(
                problem="aliases, anchors and tags are not accepted", problem_mark=event.start_mark
            )
        if self.depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {_DEEPEST} levels", problem_mark=event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Content:
    """The plain values of a file, the place of each key and list item by its path, and what was wrong with them already."""

    def __init__(self, node: yaml.Node) -> None:
        self.places: dict[KeyPath, tuple[int, int]] = {}
        self.mistakes: list[Mistake] = []
        self.values = self._plain(node, ())

    def at(self, path: KeyPath) -> Any:
        """Look up the value at ``path``; None where there is none."""
        value = self.values
        for part in path:
            inside = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
            if not inside:
                return None
            value = value[part]
        return value

    def mistake(self, path: KeyPath, text: str) -> Mistake:
        """Say something of what is at ``path``, at its place or that of what is around it."""
        place = next(self.places[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.places)
        return (*place, f"{dotted(path)}: {text}" if path else text)

    def _plain(self, node: yaml.Node, path: KeyPath) -> Any:
        self.places.setdefault(path, _place(node.start_mark))
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path))
        try:
            return _read_scalar(node)
        except ValueError as error:
            self.mistakes.append(self.mistake(path, str(error)))
            return None

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        for key, value in node.value:
            place, word = _place(key.start_mark), key.value
            if not isinstance(word, str) or not word.isprintable() or word in ("", "<<"):
                self.mistakes.append((*place, f"{dotted(path)}: a key must be a word".removeprefix(": ")))
            elif (*path, word) in self.places:
                first = ":".join(map(str, self.places[*path, word]))
                self.mistakes.append((*place, f"{dotted((*path, word))}: duplicate key, first given at {first}"))
            else:
                self.places[*path, word] = place
                yield word, self._plain(value, (*path, word))


def read_scenario(
    data: bytes, stem: str, known: Mapping[str, Collection[str]]
) -> tuple[Scenario | None, list[Mistake]]:
    """Read the one document of a file.

    Args:
        data: the content of the file.
        stem: its name without the ending, which must be the scenario's name.
        known: all ids by what they name: ``finding``, ``remedy``, ``correction``. What is left out is checked for its form only.

    Returns:
        The scenario, or None where it is none, and every mistake that was found.
    """
    try:
        node = yaml.compose(data, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        return None, [_syntax_mistake(error)]
    except ReaderError as error:
        line = 1 + data[: error.position].count(b"\n")
        return None, [(line, 1, f"not text in UTF-8 that YAML allows: {printable(error.reason)}")]
    except (ValueError, OverflowError):  # PyYAML leaves escapes beyond Unicode and huge version numbers to Python
        return None, [(1, 1, "not valid YAML: a number here is too large")]
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return None, [(1, 1, "the file is empty")]
    content = _Content(node)
    mistakes = [*content.mistakes, *_about_name(content, stem), *_about_ids(content, known)]
    try:
        return Scenario.model_validate(content.values), mistakes
    except ValidationError as refused:
        told = {mistake[:2] for mistake in mistakes}
        described = (_described(content, error) for error in refused.errors(include_url=False))
        return None, mistakes + [mistake for mistake in described if mistake[:2] not in told]


def _described(content: _Content, error: ErrorDetails) -> Mistake:
    """Give an error of pydantic its place; the kind of a workload, by which pydantic tells them apart, is no key in the file."""
    path: KeyPath = ()
    for part in error["loc"]:
        if (*path, part) in content.places:
            path = (*path, part)
    if error["type"] == "missing":
        path = (*path, error["loc"][-1])
    if error["type"] != "extra_forbidden":
        return content.mistake(path, in_words(error))
    keys = {name for part in _parts(Strict) for name in part.model_fields}
    key = str(path[-1])
    return content.mistake(path, f"unknown key{did_you_mean(key, keys) if key not in keys else ' here'}")


def _parts(part: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in part.__subclasses__():
        yield below
        yield from _parts(below)


def _about_name(content: _Content, stem: str) -> Iterator[Mistake]:
    """Compare the scenario's name with that of its file: a copy must be renamed inside, too."""
    name = content.at(("name",))
    if isinstance(name, str) and name != stem:
        yield content.mistake(("name",), f"must be {quoted(stem)}, the file's name, got {quoted(name)}")


_ID_LISTS: tuple[tuple[str, KeyPath], ...] = (
    ("finding", ("expect", "findings")),
    ("remedy", ("expect", "cured_by")),
    ("remedy", ("expect", "not_cured_by")),
    ("remedy", ("remedies",)),
    ("correction", ("corrections",)),
)
"""Lists of ids in a scenario, or of mappings with one, with what they name."""


def _about_ids(content: _Content, known: Mapping[str, Collection[str]]) -> Iterator[Mistake]:
    """Look for ids that nothing in the program has."""
    for what, path in _ID_LISTS:
        values, ids = content.at(path), known.get(what)
        for number, value in enumerate(values if isinstance(values, list) and ids is not None else ()):
            at: KeyPath = (*path, number)
            if isinstance(value, dict):
                at, value = (*at, "id"), value.get("id")
            if isinstance(value, str) and ids is not None and value not in ids:
                yield content.mistake(at, f"no {what} has the id {quoted(value)}{did_you_mean(value, ids)}")


def _syntax_mistake(error: yaml.MarkedYAMLError) -> Mistake:
    """Say where reading ended and why, in PyYAML's words."""
    mark, start = error.problem_mark, error.context_mark
    why = printable(str(error.problem)[:200].replace(r"'\x00'", "the end of the file"))
    if error.context and start is not None and mark is not None and start.line < mark.line:
        why += f" ({error.context} that starts at line {start.line + 1})"
    return (*(_place(mark) if mark else (1, 1)), f"not valid YAML: {why}")


def _place(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _read_scalar(node: yaml.Node) -> str | int | float | bool | None:
    """Read a word.

    Raises:
        ValueError: it holds a character that no file name, id or message can hold, or is a number that is too large.
    """
    word: str = node.value
    if match := _CONTROL.search(word):
        raise ValueError(f"the text holds the character U+{ord(match[0]):04X}, which is not accepted")
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return word.lower() == "true"
        case "int" if len(word) <= 19:
            return int(word)
        case "int" | "float":
            number = math.inf if word[-1].isalpha() else float(word)  # only `.inf` and `.nan` end with a letter
            if not math.isfinite(number) or node.tag.endswith("int"):
                raise ValueError("this number is too large")
            return number
        case _:
            return word


def dotted(path: KeyPath) -> str:
    """Write a path as a person does: ``("steps", 0, "model")`` is ``steps[0].model``; empty for the whole file."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if part.isidentifier() and len(part) <= QUOTE_LIMIT else quoted(part)
            text += f".{shown}" if text else shown
    return text


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


def in_words(error: ErrorDetails) -> str:
    """Give pydantic's sentence, what was given instead, and the choice that may be meant."""
    given, context = error["input"], error.get("ctx", {})
    sentence = re.sub(r" or (instance of \w+|object to extract fields from)|^Value error, ", "", error["msg"])
    if error["type"] not in ("missing", "value_error", "union_tag_invalid", "union_tag_not_found"):
        shown = quoted(given) if isinstance(given, str) else repr(given) if isinstance(given, (int, float)) else ""
        sentence += f", got {shown}" if shown else ""
    choices = re.findall(r"'([^']*)'", context.get("expected_tags", context.get("expected", "")))
    word = str(context.get("tag", given))
    return sentence + did_you_mean(_OTHER_WORDS.get(word.lower(), word), choices)
