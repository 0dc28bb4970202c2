"""Writes what an instrument has seen, with the coordinates of the moment."""

from typing import Any

from dtypedoctor.instrument.position import Position
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.writer import TraceWriter

__all__ = ["observe"]


def observe(
    writer: TraceWriter, position: Position, what: Any, *, fqn: str | None = None, phase: str | None = None
) -> None:
    """Writes ``what``, a record of :mod:`dtypedoctor.trace.records`, about the module ``fqn``; ``phase`` where it is not the present one."""
    phase = phase if phase is not None else position.phase
    writer.write(Observed(n=writer.next_n(), step=position.step, call=position.call, phase=phase, what=what, fqn=fqn))
