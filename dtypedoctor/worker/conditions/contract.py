"""What a condition is, and how it tells that it took effect."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

TookEffect = Callable[[], None]
"""Called each time something went another way than it would have gone."""

Switch = Callable[[TookEffect], AbstractContextManager[None]]
"""Inside the context manager that it returns the condition is in force; leaving puts everything back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that holds for the whole process and can be switched from outside, whatever code runs in it.

    Attributes:
        id: kebab-case id, used in ``conditions:`` of a scenario and after ``--try``.
        switches: by the name of the module that each takes hold of; none of these is imported for the condition's sake.
        without_effect: why it took no effect where it took none.
    """

    id: str
    switches: Mapping[str, Switch]
    without_effect: str
