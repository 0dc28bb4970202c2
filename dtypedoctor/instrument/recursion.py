"""Room on Python's stack, so that a program recurses through module calls as deep as without hooks."""

import sys
from contextlib import suppress

DEEP = 24
"""Open module calls up to which no program comes near the limit."""
HOOK = 80
"""Frames that a hook takes at most."""


class Room:
    """Raises the recursion limit by the frames that are there because of us.

    torch calls a module by one more function where any hook is registered, and a hook calls functions itself: one of ours that is left without frames
    could neither measure nor say so.

    Attributes:
        added: by how much the limit is raised now.
    """

    __slots__ = ("_limit", "added")

    def __init__(self) -> None:
        self._limit = 0
        self.added = 0

    def make(self, calls: int, frames: int = 0) -> None:
        """Raises the limit by one frame for each of so many open module calls, and by ``frames``; not at all where there are few."""
        limit = sys.getrecursionlimit()
        base = limit - self.added if limit == self._limit else limit  # the program may have set it
        added = calls + frames if calls > DEEP else 0
        with suppress(RecursionError):  # lower than where we are; it is lowered later
            sys.setrecursionlimit(base + added)
            self._limit, self.added = base + added, added
