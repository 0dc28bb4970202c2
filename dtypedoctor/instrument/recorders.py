"""The recorder of each device."""

from collections.abc import Sequence

import torch

from dtypedoctor.instrument.device_rows import device_rows
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.recorder import ImmediateRecorder, Item, Recorder, When
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
        self._position = position
        self._sites = sites
        self._immediate = ImmediateRecorder(writer, position, sites)
        self._streams: dict[torch.device, StreamRecorder] = {}

    def record(self, items: Sequence[Item], given: Sequence[Item] = (), when: When | None = None) -> None:
        """Measures ``items`` and, only if one of them is not finite, also ``given``."""
        if not items:
            return
        device = items[0].looks.device
        if all(item.looks.device == device for item in items) and all(item.looks.device == device for item in given):
            self._of(device).record(items, given, when)
            return
        for i, item in enumerate(items):
            device = item.looks.device
            self._of(device).record(
                [item],
                [one for one in given if one.looks.device == device],
                When(when.n + i, when.step, when.call) if when is not None else None,
            )

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

    def _all(self) -> list[Recorder]:
        return [self._immediate, *self._streams.values()]

    def _of(self, device: torch.device) -> Recorder:
        if device.type not in BEHIND:
            return self._immediate
        found = self._streams.get(device)
        if found is None:
            rows = device_rows(device)
            found = self._streams[device] = StreamRecorder(self._writer, self._position, self._sites, rows, device)
        return found
