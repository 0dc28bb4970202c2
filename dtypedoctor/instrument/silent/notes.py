"""Writes what the silent checks see as observations."""

from typing import Any

from dtypedoctor.instrument.observing import observe
from dtypedoctor.instrument.position import Position
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.writer import TraceWriter

MAX_NOTES = 40
"""Observations of one kind; a defect that is seen everywhere need not be told everywhere."""


class Notes:
    """Observations with the coordinates of the moment at which they are made.

    Args:
        writer: where they go.
        position: tells step, call and phase.
    """

    def __init__(self, writer: TraceWriter, position: Position) -> None:
        self._writer = writer
        self._position = position
        self._told: dict[str, set[Any]] = {}

    def once(self, what: Any, key: Any, fqn: str | None = None) -> None:
        """Writes a record unless one of the same kind and key has been written."""
        told = self._told.setdefault(what.KIND, set())
        if key in told or len(told) >= MAX_NOTES:
            return
        told.add(key)
        self.write(what, fqn)

    def write(self, what: Any, fqn: str | None = None) -> None:
        """Writes a record about the module ``fqn``."""
        observe(self._writer, self._position, what, fqn=fqn)

    def leave_out(self, what: str, why: str) -> None:
        """Tells once that something is not checked."""
        told = self._told.setdefault("left out", set())
        if what not in told:
            told.add(what)
            self._writer.write(NotWatched(what=what, why=why))
