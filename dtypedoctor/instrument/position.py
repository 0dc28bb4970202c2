"""Where the watched process is: training step, outermost call, phase, and the module calls that are open."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn


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
        self.overrides.append(phase)
        try:
            yield
        finally:
            self.overrides.pop()

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Nothing inside is recorded."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1
