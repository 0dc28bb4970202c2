"""Writes what the silent checks see as observations."""

from collections.abc import Mapping
from typing import Any

from dtypedoctor.instrument.position import Position
from dtypedoctor.trace.events import NotWatched, Observation
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

    def once(self, kind: str, key: Any, fqn: str | None, values: Mapping[str, Any]) -> None:
        """Writes an observation unless one of the same kind and key has been written."""
        told = self._told.setdefault(kind, set())
        if key in told or len(told) >= MAX_NOTES:
            return
        told.add(key)
        self.write(kind, fqn, values)

    def write(self, kind: str, fqn: str | None, values: Mapping[str, Any]) -> None:
        """Writes an observation about the module ``fqn``.

        The name is repeated in ``values``: a trace leaves empty fields out, and the outermost module's name is empty.
        """
        position = self._position
        self._writer.write(
            Observation(
                n=self._writer.next_n(), step=position.step, call=position.call, phase=position.phase, kind=kind,
                fqn=fqn, values={**values, "fqn": fqn},
            )
        )  # fmt: skip

    def leave_out(self, what: str, why: str) -> None:
        """Tells once that something is not checked."""
        told = self._told.setdefault("left out", set())
        if what not in told:
            told.add(what)
            self._writer.write(NotWatched(what=what, why=why))
