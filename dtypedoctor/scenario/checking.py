"""Checks a tree of YAML values against the scenario's model, and finds the place in the file of each of pydantic's errors."""

from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from dtypedoctor.scenario.model import Name, Scenario
from dtypedoctor.scenario.problems import (
    KeyPath,
    Place,
    Problem,
    allowed_words,
    closest,
    did_you_mean,
    dotted,
    in_words,
    quoted,
)
from dtypedoctor.scenario.yaml_nodes import Node
from dtypedoctor.values import dataclass


@dataclass(frozen=True, slots=True)
class Spot:
    """Where an error is.

    Attributes:
        path: keys and indices as they stand in the file. pydantic's own path also holds the kind of a workload.
        keys: the keys that are known at the end of the path; empty where no mapping with fixed keys is wanted.
    """

    path: KeyPath
    keys: tuple[str, ...]


def follow(location: KeyPath) -> Spot:
    """Follows pydantic's ``loc`` from the top of a scenario."""
    wanted: Any = Scenario
    path: list[str | int] = []
    for part in location:
        members = _models(wanted)
        if len(members) > 1:  # the parts of a union are told apart by their kind, which is no key in the file
            wanted = next((member for member in members if part in _kinds(member)), None)
            continue
        path.append(part)
        wanted = _inside(wanted, part)
    members = _models(wanted)
    return Spot(tuple(path), tuple(members[0].model_fields) if len(members) == 1 else ())


def _inside(wanted: Any, part: str | int) -> Any:
    """What is wanted under a key or at an index of what is wanted; None where nothing fixed is."""
    members = _models(wanted)
    if members:
        field = members[0].model_fields.get(str(part))
        return field.annotation if field else None
    for option in _options(wanted):
        if get_origin(option) is list:
            return get_args(option)[0]
    return None


def _models(wanted: Any) -> list[type[BaseModel]]:
    return [option for option in _options(wanted) if isinstance(option, type) and issubclass(option, BaseModel)]


def _options(wanted: Any) -> list[Any]:
    """The members of a union without None; the type itself where it is none."""
    if get_origin(wanted) is Annotated:
        return _options(get_args(wanted)[0])
    if get_origin(wanted) in (Union, UnionType):
        return [option for member in get_args(wanted) if member is not NoneType for option in _options(member)]
    return [wanted]


def _kinds(member: type[BaseModel]) -> tuple[Any, ...]:
    annotation = member.model_fields["kind"].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def check(tree: Node) -> tuple[Scenario | None, list[Problem]]:
    """The scenario that the tree describes, or every way in which it describes none.

    A misspelt key is noted and then read as the key that it seems to mean, so that mistakes below it are found too and
    that key is not called missing. The tree is changed accordingly.
    """
    problems: list[Problem] = []
    while True:
        try:
            return Scenario.model_validate(tree.plain()), problems
        except ValidationError as refused:
            errors = refused.errors(include_url=False)
        corrected = [problem for error in errors if (problem := _correct_spelling(tree, error))]
        problems += corrected
        if not corrected:
            problems += [problem for error in errors if (problem := _describe(tree, error))]
            return None, problems


def check_name(tree: Node, stem: str) -> list[Problem]:
    """The scenario's name must be that of its file."""
    node = tree.find(("name",))
    if node is None or not isinstance(node.value, str) or node.value == stem:
        return []
    if not _is_name(stem):
        text = f"name: must be the file's name, but {quoted(stem)} cannot be one; rename the file"
        return [Problem(node.place, text)]
    return [Problem(node.place, f"name: must be {quoted(stem)}, the file's name, got {quoted(node.value)}")]


def _is_name(text: str) -> bool:
    try:
        TypeAdapter(Name).validate_python(text)
    except ValidationError:
        return False
    return True


def check_ids(tree: Node, known: Mapping[str, Collection[str]]) -> list[Problem]:
    """Ids that nothing in the program has.

    Args:
        tree: the file's content.
        known: all ids by what they name: ``finding``, ``remedy``, ``correction``. What is left out is not checked.
    """
    problems = []
    for what, path, node in _ids(tree):
        ids = known.get(what)
        if ids is not None and isinstance(node.value, str) and node.value not in ids:
            text = f"no {what} has the id {quoted(node.value)}{did_you_mean(node.value, ids)}"
            problems.append(Problem(node.place, f"{dotted(path)}: {text}"))
    return problems


_ID_LISTS: tuple[tuple[str, KeyPath], ...] = (
    ("finding", ("expect", "findings")),
    ("remedy", ("expect", "cured_by")),
    ("remedy", ("expect", "not_cured_by")),
    ("remedy", ("remedies",)),
)


def _ids(tree: Node) -> list[tuple[str, KeyPath, Node]]:
    found = []
    for what, path in _ID_LISTS:
        found += [(what, (*path, i), node) for i, node in enumerate(_items(tree.find(path)))]
    for i, correction in enumerate(_items(tree.find(("corrections",)))):
        node = correction.child("id")
        if node:
            found.append(("correction", ("corrections", i, "id"), node))
    return found


def _items(node: Node | None) -> list[Node]:
    return node.value if node and isinstance(node.value, list) else []


def _correct_spelling(tree: Node, error: ErrorDetails) -> Problem | None:
    """Renames the misspelt key, or replaces the misspelt kind, that the error is about; None where it is not about one."""
    if error["type"] == "extra_forbidden":
        return _rename(tree, _spot(error).path, follow(error["loc"][:-1]).keys)
    if error["type"] == "union_tag_not_found":
        path = _spot(error).path
        mapping = tree.find(path)
        keys = cast(dict[str, object], mapping.value) if mapping else {}
        misspelt = closest("kind", keys)
        return _rename(tree, (*path, misspelt), ("kind",)) if misspelt else None
    if error["type"] == "union_tag_invalid":
        return _replace_kind(tree, error)
    return None


def _rename(tree: Node, path: KeyPath, keys: tuple[str, ...]) -> Problem | None:
    mapping = tree.find(path[:-1])
    wrong = str(path[-1])
    right = closest(wrong, keys)
    if mapping is None or not isinstance(mapping.value, dict) or right is None or right in mapping.value:
        return None
    entry = mapping.value.pop(wrong)
    mapping.value[right] = entry
    return Problem(entry.key_place, f"{dotted(path)}: unknown key; did you mean '{right}'?")


def _replace_kind(tree: Node, error: ErrorDetails) -> Problem | None:
    path = (*_spot(error).path, "kind")
    node = tree.find(path)
    if node is None or not isinstance(node.value, str):
        return None
    right = closest(node.value, allowed_words(error))
    if right is None:
        return None
    node.value = right
    return Problem(node.place, f"{dotted(path)}: {in_words(error)}")


def _spot(error: ErrorDetails) -> Spot:
    return follow(error["loc"])


def _describe(tree: Node, error: ErrorDetails) -> Problem | None:
    """The error in words; None where it is only about a value that was already refused."""
    path = _spot(error).path
    if error["type"] == "extra_forbidden":
        return _unknown_key(tree, path, follow(error["loc"][:-1]).keys)
    if error["type"] == "union_tag_invalid":
        path = (*path, "kind")
    node = tree.find(path)
    if node and not node.readable:
        return None
    text = f"{dotted(path)}: {in_words(error)}" if path else f"a scenario {in_words(error)}"
    return Problem(_place(tree, path), text)


def _unknown_key(tree: Node, path: KeyPath, keys: tuple[str, ...]) -> Problem:
    mapping = tree.find(path[:-1])
    assert mapping is not None
    assert isinstance(mapping.value, dict)
    place = mapping.value[str(path[-1])].key_place
    suggestion = did_you_mean(str(path[-1]), keys) or f"; known here: {', '.join(keys)}"
    return Problem(place, f"{dotted(path)}: unknown key{suggestion}")


def _place(tree: Node, path: KeyPath) -> Place:
    """The place of the value at ``path``, or of the innermost value around it that exists."""
    for end in range(len(path), -1, -1):
        node = tree.find(path[:end])
        if node:
            return node.place
    return tree.place
