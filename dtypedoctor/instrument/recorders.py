"""The recorder of each device."""

import torch

from dtypedoctor.instrument.device_rows import device_rows
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.recorder import Given, ImmediateRecorder, Recorder, Rows, When
from dtypedoctor.instrument.sites import Sites
from dtypedoctor.instrument.stream_recorder import StreamRecorder
from dtypedoctor.trace.writer import TraceWriter

BEHIND = frozenset({"cuda"})
"""Device types whose work is queued, so that waiting for a result would cost more than measuring it."""


class Recorders:
    """Hands tensors to the recorder of their device.

    Args:
        writer: where the samples go.
        position: shared coordinates.
        sites: numbers the places.
    """

    def __init__(self, writer: TraceWriter, position: Position, sites: Sites) -> None:
        self._writer = writer
        self._sites = sites
        self._immediate = ImmediateRecorder(writer, position, sites)
        self._of: dict[torch.device, Recorder] = {}

    def record(self, rows: Rows, when: When, given: Given | None = None) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also ``given``."""
        first = rows[0][1].device
        recorder = self._of.get(first) or self._begin(first)
        if len(rows) == 1 or all(tensor.device == first for _, tensor in rows):
            recorder.record(rows, when, given)
            return
        for i, row in enumerate(rows):
            recorder = self._of.get(row[1].device) or self._begin(row[1].device)
            recorder.record([row], When(when.n + i, when.step, when.call), given)

    def suspicious(self) -> bool:
        """Whether something that was not finite has become known since this was asked last."""
        found = any(recorder.suspicious for recorder in self._all())
        for recorder in self._all():
            recorder.suspicious = False
        return found

    def begin_call(self) -> None:
        """An outermost module call begins."""
        for recorder in self._all():
            recorder.begin_call()

    def flush(self) -> None:
        """A natural pause: sends off what has been put together so far. Never waits."""
        for recorder in self._all():
            recorder.flush()

    def finish(self) -> None:
        """Everything measured gets into the trace as far as it can still be had."""
        for recorder in self._all():
            recorder.finish()

    def _all(self) -> set[Recorder]:
        return set(self._of.values())

    def _begin(self, device: torch.device) -> Recorder:
        found: Recorder = self._immediate
        if device.type in BEHIND:
            found = StreamRecorder(self._writer, self._sites, device_rows(device), device)
        self._of[device] = found
        return found
