"""Follows the places that pydantic names through the parts of a scenario."""

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from dtypedoctor.scenario.model import Scenario
from dtypedoctor.scenario.problems import KeyPath

__all__ = ["Spot", "follow"]


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
