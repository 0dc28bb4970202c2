"""Where the watched process is: training step, outermost call, phase, and the module calls that are open."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

FOR_GOOD = 1 << 30
"""``muted`` of a process in which nothing is ever recorded again."""


@dataclass(slots=True)
class Position:
    """Mutable coordinates, shared by all instruments of one process.

    Attributes:
        step: training step being worked on, from 1.
        call: number of the outermost module call being worked on, from 1 (0 before the first).
        stack: the module calls that are open, outermost first.
        backward_depth: how many backward passes are running (more than one only when nested).
        overrides: phases set by enclosing wrappers (``generate``, ``optimizer``, ``probe``), innermost last.
        muted: while positive, nothing is recorded (the doctor's own work).
    """

    step: int = 1
    call: int = 0
    stack: list[nn.Module] = field(default_factory=list)
    backward_depth: int = 0
    overrides: list[str] = field(default_factory=list)
    muted: int = 0

    @property
    def phase(self) -> str:
        """The phase of a module call or op that happens now."""
        if self.overrides:
            return self.overrides[-1]
        if self.backward_depth:
            return "recompute" if self.stack else "backward"
        return "forward"

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Marks everything inside as belonging to ``phase``."""
        open_before = len(self.overrides)
        try:
            self.overrides.append(phase)
            yield
        finally:
            del self.overrides[open_before:]

    def mute(self) -> "Muted":
        """Nothing inside is recorded."""
        return Muted(self)

    def unmute(self) -> None:
        """Records again after an interruption, whatever was muted when it came."""
        if self.muted < FOR_GOOD:
            self.muted = 0


class Muted:
    """Mutes a position in a ``with`` block.

    An interruption may come at the beginning of any function, so also of ``__exit__``: :meth:`Position.unmute` puts that right.
    """

    __slots__ = ("_position",)

    def __init__(self, position: Position) -> None:
        self._position = position

    def __enter__(self) -> None:
        self._position.muted += 1

    def __exit__(self, *_: object) -> None:
        if self._position.muted:
            self._position.muted -= 1
