"""The recorder of each device."""

from collections.abc import Sequence

from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.recorder import ImmediateRecorder, Item, Recorder
from dtypedoctor.instrument.sites import Sites
from dtypedoctor.trace.writer import TraceWriter


class Recorders:
    """Hands tensors to the recorder of their device.

    Args:
        writer: where the samples go.
        position: shared coordinates.
        sites: numbers the places.
    """

    def __init__(self, writer: TraceWriter, position: Position, sites: Sites) -> None:
        self._immediate = ImmediateRecorder(writer, position, sites)
        self._all: list[Recorder] = [self._immediate]

    def record(self, items: Sequence[Item], given: Sequence[Item] = ()) -> None:
        """Measures ``items`` and, only if one of them is not finite, also ``given``."""
        if items:
            self._immediate.record(items, given)

    def begin_call(self) -> None:
        """An outermost module call begins."""
        for recorder in self._all:
            recorder.begin_call()

    def flush(self) -> None:
        """A natural pause: sends off what has been put together so far. Never waits."""
        for recorder in self._all:
            recorder.flush()

    def finish(self) -> None:
        """Everything measured gets into the trace as far as it can still be had."""
        for recorder in self._all:
            recorder.finish()
