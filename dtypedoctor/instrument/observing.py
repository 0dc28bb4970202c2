"""Writes what an instrument has seen, with the coordinates of the moment."""

from typing import Any

from dtypedoctor.instrument.position import Position
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.writer import TraceWriter

__all__ = ["observe"]


def observe(writer: TraceWriter, position: Position, what: Any, *, fqn: str | None = None) -> None:
    """Writes ``what``, a record of :mod:`dtypedoctor.trace.records`, about the module ``fqn``."""
    writer.write(
        Observed(n=writer.next_n(), step=position.step, call=position.call, phase=position.phase, what=what, fqn=fqn)
    )
