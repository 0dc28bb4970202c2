"""What a trace holds of one kind of observation, as it stands on disk."""

from dtypedoctor.trace.events import Observation
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records import RECORDS, to_disk


def observed(trace: Trace, kind: str) -> list[Observation]:
    """The observations of ``kind``, in file order. An unknown kind is a KeyError, so that none of it is not taken for a result."""
    return [to_disk(found) for found in trace.observed(RECORDS[kind])]
