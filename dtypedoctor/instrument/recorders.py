"""The recorder of each device."""

from collections.abc import Sequence

import torch

from dtypedoctor.instrument.device_rows import device_rows
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.recorder import ImmediateRecorder, Recorder, Rows, Source
from dtypedoctor.instrument.sites import Sites
from dtypedoctor.instrument.statistics import Named
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

    def record(
        self, rows: Rows, when: tuple[int, int, int], source: Source | None = None, given: Sequence[Named] = ()
    ) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also what was ``given`` to ``source``."""
        first = rows[0][1].device
        if len(rows) == 1 or all(tensor.device == first for _, tensor in rows):
            self.of(first).record(rows, when, source, given)
            return
        n, step, call = when
        for i, row in enumerate(rows):
            self.of(row[1].device).record([row], (n + i, step, call), source, given)

    def of(self, device: torch.device) -> Recorder:
        """The recorder of ``device``, always the same one."""
        return self._of.get(device) or self._begin(device)

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

    def end_call(self) -> None:
        """An outermost module call has ended: sends off what has been put together so far. Never waits."""
        for recorder in self._all():
            recorder.end_call()

    def flush(self) -> None:
        """A pass has ended: sends off what has been put together and writes down what is known. Never waits."""
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
