"""Records what a GPU computes without ever waiting for it.

Tensors are put together and measured by one launch behind the work of their stream; the results are written to the trace
when they are found in the host's memory, at a later hook. A sample gets its number when its tensor is handed over, so the
order of events in the trace is that of execution, whenever a sample reaches the disk.

What is changed in place between being handed over and being launched would be measured wrongly. torch's version counter
tells: that sample is left out, and from then on tensors of its site are launched at once, as are all of a new site.
"""

import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from dtypedoctor.instrument.batches import Batches, Row
from dtypedoctor.instrument.device_rows import DeviceRows
from dtypedoctor.instrument.recorder import Given, Rows, When, version_of
from dtypedoctor.instrument.sites import Looks, Sites
from dtypedoctor.instrument.statistics import modes_are_on, out_of_their_sight
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.writer import SampleRow, TraceWriter

PATIENCE = 5.0
"""Seconds to wait at the end of a run for what is still on its way."""

READ_SECONDS = 0.05
"""How often results are looked for while the program calls no module."""


class _Doubt(NamedTuple):
    """What went into a module, to be recorded only if something not finite came out."""

    returned: list[Row]
    source: Given
    given: list[tuple[str, torch.dtype, torch.Size, Row]]
    when: When


class StreamRecorder:
    """The recorder of one CUDA device.

    Args:
        writer: where the samples go.
        sites: numbers the places.
        rows: measures on the device.
        device: the device.
    """

    def __init__(self, writer: TraceWriter, sites: Sites, rows: DeviceRows, device: torch.device) -> None:
        self._writer = writer
        self._sites = sites
        self._device = device
        self._batches = Batches(rows, device)
        self._known: dict[int, tuple[ref[Tensor], Row]] = {}
        self._doubts: deque[_Doubt] = deque()
        self._seen: set[int] = set()
        self._at_once: set[int] = set()
        self._new: list[tuple[ref[Tensor], int, int]] = []
        self._changed = 0
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None
        self.suspicious = False

    def record(self, rows: Rows, when: When, given: Given | None = None) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also ``given``."""
        if modes_are_on():
            with out_of_their_sight():
                self.record(rows, when, given)
            return
        with self._lock:
            returned = self._hand_over(rows, when)
            if given is not None and given.tensors:
                self._doubt(returned, given, when)
        if self._reader is None:
            self._read_in_background()

    def _hand_over(self, rows: Rows, when: When) -> list[Row]:
        n, step, call = when
        returned = []
        for i, (site, tensor) in enumerate(rows):
            row = self._row(tensor)
            returned.append(row)
            if row.counts is not None:
                self._write([(n + i, step, call, site, row)])
                continue
            row.entries.append((n + i, step, call, site))
            if site not in self._seen or site in self._at_once or row.version < 0:
                self._measure_now(site, tensor, row)
        return returned

    def _read_in_background(self) -> None:
        """Writes down what has arrived also while the program waits for the device, perhaps for ever."""
        self._ended.clear()

        def read() -> None:
            while not self._ended.wait(READ_SECONDS):
                with self._lock:
                    self._write_settled(self._batches.drain())

        self._reader = threading.Thread(target=read, daemon=True, name="dtypedoctor-reader")
        self._reader.start()

    def begin_call(self) -> None:
        """Forgets what was measured: from here on it is another call's."""
        self._known.clear()

    def flush(self) -> None:
        """Launches everything, and writes what has arrived."""
        if modes_are_on():
            with out_of_their_sight():
                self.flush()
            return
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._launch()
        self._launch()  # what was waiting for gates in the first
        for tensor, version, site in self._new:
            held = tensor()
            if held is not None and version_of(held) != version:
                self._at_once.add(site)
        self._new.clear()
        self._write_settled(self._batches.drain())

    def finish(self) -> None:
        """Waits a little for what is on its way, and writes down how much is missing."""
        if self._reader is not None:
            self._ended.set()
            self._reader.join()
            self._reader = None
        self.flush()
        self._write_settled(self._batches.wait(PATIENCE))
        self._doubts.clear()
        self._known.clear()
        self._tell_what_is_missing()

    def _row(self, tensor: Tensor, gate: Row | None = None) -> Row:
        """The row of a tensor; each distinct tensor is measured once, as a container returns what its last child returned."""
        held = self._known.get(id(tensor))
        if held is not None and held[0]() is tensor and held[1].version == version_of(tensor):
            return held[1]
        row = self._batches.add(tensor, gate)
        if gate is None:
            self._known[id(tensor)] = (ref(tensor), row)
        return row

    def _measure_now(self, site: int, tensor: Tensor, row: Row) -> None:
        if site not in self._seen:
            self._seen.add(site)
            self._new.append((ref(tensor), row.version, site))
        self._launch()

    def _doubt(self, returned: list[Row], source: Given, when: When) -> None:
        gate = returned[0]
        if gate.counts is not None and not gate.suspicious:
            return
        found = []
        for path, tensor in source.tensors:
            if tensor.device == self._device:
                found.append((path, tensor.dtype, tensor.shape, self._row(tensor, gate)))
        first = self._writer.next_n(len(found))
        self._doubts.append(_Doubt(returned, source._replace(tensors=()), found, When(first, when.step, when.call)))

    def _launch(self) -> None:
        for row in self._batches.launch():
            self._changed += 1
            self._at_once.update(site for _, _, _, site in row.entries)
        self._write_settled(self._batches.drain())

    def _write_settled(self, rows: list[Row]) -> None:
        if not rows:
            return
        self._write((*entry, row) for row in rows for entry in row.entries)
        self.suspicious = self.suspicious or any(row.suspicious for row in rows)
        while self._doubts:
            returned, source, given, when = self._doubts[0]
            if not all(row.settled for row in returned):
                return
            if any(row.suspicious for row in returned):
                if not all(row.settled for *_, row in given):
                    return
                self._write_given(source, given, when)
            self._doubts.popleft()

    def _write_given(self, source: Given, given: list[tuple[str, torch.dtype, torch.Size, Row]], when: When) -> None:
        for i, (path, dtype, shape, row) in enumerate(given):
            if row.counts is not None:
                looks = Looks(source.phase, "input", path, dtype, shape, source.autocast, self._device)
                self._write([(when.n + i, when.step, when.call, self._sites.id_of(source.place, looks), row)])

    def _write(self, found: Iterable[tuple[int, int, int, int, Row]]) -> None:
        """Writes samples, those that follow each other in one line."""
        line: list[SampleRow] = []
        start = (0, 0, 0)
        for n, step, call, site, row in sorted(found, key=_number):
            if line and (n, step, call) != (start[0] + len(line), start[1], start[2]):
                self._writer.write_samples(*start, line)
                line = []
            if not line:
                start = (n, step, call)
            assert row.counts is not None
            line.append((site, *row.counts))
        if line:
            self._writer.write_samples(*start, line)

    def _tell_what_is_missing(self) -> None:
        dropped, self._batches.dropped = self._batches.dropped, 0
        if dropped:
            why = (
                "the device stopped before they had arrived" if self._batches.dead else "the device was too far behind"
            )
            self._writer.write(NotWatched(what=f"{dropped} measurements on the device", why=why))
        changed, self._changed = self._changed, 0
        if changed:
            why = "the tensors were changed in place before they could be measured"
            self._writer.write(NotWatched(what=f"{changed} measurements on the device", why=why))


def _number(entry: tuple[int, int, int, int, Row]) -> int:
    return entry[0]
