"""Records what a GPU computes without ever waiting for it.

Tensors are put together and measured by one launch behind the work of their stream; the results are written to the trace
when they are found in the host's memory, at a later hook. A sample gets its number when its tensor is handed over, so the
order of events in the trace is that of execution, whenever a sample reaches the disk.

What is changed in place between being handed over and being launched would be measured wrongly. torch's version counter
tells: that sample is left out, and from then on tensors of its site are launched at once, as are all of a new site.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from dtypedoctor.instrument.batches import Batches, Row
from dtypedoctor.instrument.device_rows import DeviceRows
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.recorder import Item, When, version_of
from dtypedoctor.instrument.sites import Sites
from dtypedoctor.instrument.statistics import modes_are_on, out_of_their_sight
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.writer import SampleRow, TraceWriter

PATIENCE = 5.0
"""Seconds to wait at the end of a run for what is still on its way."""


@dataclass(slots=True, eq=False)
class _Doubt:
    """What went into a module, to be recorded only if something not finite came out."""

    returned: list[Row]
    given: list[tuple[Item, Row]]
    first: int
    step: int
    call: int


class StreamRecorder:
    """The recorder of one CUDA device.

    Args:
        writer: where the samples go.
        position: shared coordinates.
        sites: numbers the places.
        rows: measures on the device.
        device: the device.
    """

    def __init__(
        self, writer: TraceWriter, position: Position, sites: Sites, rows: DeviceRows, device: torch.device
    ) -> None:
        self._writer = writer
        self._position = position
        self._sites = sites
        self._batches = Batches(rows, device)
        self._known: dict[int, tuple[ref[Tensor], Row]] = {}
        self._doubts: deque[_Doubt] = deque()
        self._seen: set[int] = set()
        self._at_once: set[int] = set()
        self._new: list[tuple[ref[Tensor], int, int]] = []
        self._changed = 0
        self.suspicious = False

    def record(self, items: Sequence[Item], given: Sequence[Item] = (), when: When | None = None) -> None:
        """Measures ``items`` and, only if one of them is not finite, also ``given``."""
        if modes_are_on():
            with out_of_their_sight():
                self.record(items, given, when)
            return
        when = when or When(self._writer.next_n(len(items)), self._position.step, self._position.call)
        returned = [self._note(item, (when.n + i, when.step, when.call)) for i, item in enumerate(items)]
        if given:
            self._doubt(returned, given)

    def begin_call(self) -> None:
        """Forgets what was measured: from here on it is another call's."""
        self._known.clear()

    def flush(self) -> None:
        """Launches everything, and writes what has arrived."""
        if modes_are_on():
            with out_of_their_sight():
                self.flush()
            return
        self._launch()
        self._launch()  # what was waiting for gates in the first
        self._keep_apart_what_changed()
        self._write_settled(self._batches.drain())

    def finish(self) -> None:
        """Waits a little for what is on its way, and writes down how much is missing."""
        self.flush()
        self._write_settled(self._batches.wait(PATIENCE))
        self._doubts.clear()
        self._tell_what_is_missing()

    def _note(self, item: Item, where: tuple[int, int, int]) -> Row:
        site = self._sites.id_of(item.place, item.looks)
        entry = (*where, site)
        row = self._row(item.tensor)
        if row.counts is not None:
            self._write([(*entry, row)])
            return row
        row.entries.append(entry)
        if site in self._at_once or row.version < 0:
            self._launch()
        elif site not in self._seen:
            self._seen.add(site)
            self._new.append((ref(item.tensor), row.version, site))
            self._launch()
        return row

    def _row(self, tensor: Tensor, gate: Row | None = None) -> Row:
        held = self._known.get(id(tensor))
        if held is not None and held[0]() is tensor and held[1].version == version_of(tensor):
            return held[1]
        row = self._batches.add(tensor, gate)
        if gate is None:
            self._known[id(tensor)] = (ref(tensor), row)
        return row

    def _doubt(self, returned: list[Row], given: Sequence[Item]) -> None:
        if not returned or all(row.settled and not row.suspicious for row in returned):
            return
        position = self._position
        rows = [(Item(i.place, i.looks, _NOTHING), self._row(i.tensor, returned[0])) for i in given]
        first = self._writer.next_n(len(rows))
        self._doubts.append(_Doubt(returned, rows, first, position.step, position.call))

    def _launch(self) -> None:
        for row in self._batches.launch():
            self._changed += 1
            self._at_once.update(site for _, _, _, site in row.entries)
        self._write_settled(self._batches.drain())

    def _keep_apart_what_changed(self) -> None:
        for tensor, version, site in self._new:
            held = tensor()
            if held is not None and version_of(held) != version:
                self._at_once.add(site)
        self._new.clear()

    def _write_settled(self, rows: list[Row]) -> None:
        self._write((*entry, row) for row in rows for entry in row.entries)
        self.suspicious = self.suspicious or any(row.suspicious for row in rows)
        while self._doubts and all(row.settled for row in self._doubts[0].returned):
            doubt = self._doubts[0]
            suspicious = any(row.suspicious for row in doubt.returned)
            if suspicious and not all(row.settled for _, row in doubt.given):
                return
            self._doubts.popleft()
            if suspicious:
                self._write(
                    (doubt.first + i, doubt.step, doubt.call, self._sites.id_of(item.place, item.looks), row)
                    for i, (item, row) in enumerate(doubt.given)
                    if row.counts is not None
                )

    def _write(self, found: Iterable[tuple[int, int, int, int, Row]]) -> None:
        """Writes samples, those that follow each other in one line."""
        line: list[SampleRow] = []
        start = (0, 0, 0)
        for n, step, call, site, row in sorted(found, key=lambda one: one[0]):
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


_NOTHING = torch.empty(0)
