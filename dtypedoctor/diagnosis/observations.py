"""Finds the records of one specialised instrument."""

from collections.abc import Iterator

from dtypedoctor.trace.events import Observation
from dtypedoctor.trace.reader import Trace

__all__ = ["last_observed", "observed"]


def observed(trace: Trace, kind: str) -> Iterator[Observation]:
    """All observations of one kind, in file order."""
    return (observation for observation in trace.all(Observation) if observation.kind == kind)


def last_observed(trace: Trace, kind: str) -> Observation | None:
    """The last observation of one kind."""
    found = list(observed(trace, kind))
    return found[-1] if found else None
