"""When something happened, in the count that the program itself goes by."""

from dtypedoctor.trace.events import Op, Raised, ScalerState
from dtypedoctor.trace.reader import Trace

__all__ = ["step_of"]

OF_TRAINING = frozenset({"loss", "grad", "grad_output", "param"})
"""Kinds of sites that only training leaves."""


def step_of(trace: Trace, record: Op | Raised) -> int:
    """The training step of a record; for a program that does not train, the number of the outermost call.

    Calls inside ``generate`` are one for each token, so there the step is kept.
    """
    trains = record.step > 1 or any(site.kind in OF_TRAINING for site in trace.sites.values()) or trace.all(ScalerState)
    return record.step if trains or record.phase == "generate" else max(record.call, 1)
