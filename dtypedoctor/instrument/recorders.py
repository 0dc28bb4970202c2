"""The recorders: on a CPU a tensor is measured when it is handed over, on a GPU behind the stream, without ever waiting for it.

On a GPU tensors are put together and measured by one launch behind the work of their stream; the results are written to the trace
when they are found in the host's memory: at a later hook if the device is behind, else by a thread that looks now and then, so
that a device which waits for the host does not wait for that too. A sample gets its number when its tensor is handed over, so the
order of events in the trace is that of execution, whenever a sample reaches the disk.

What is changed in place between being handed over and being launched would be measured wrongly. torch's version counter
tells: that sample is left out, and from then on tensors of its site are launched at once, as are all of a new site.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from math import isnan
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from dtypedoctor._torch_private import Writes, version_now, version_of
from dtypedoctor.instrument import batches
from dtypedoctor.instrument.batches import Batches, Counts, DeviceRows, Row, device_rows
from dtypedoctor.instrument.places import Looks, Recorder, Rows, Sites, Source
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import Extent, Named, measure_one, modes_are_on, out_of_their_sight
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.writer import SampleRow, TraceWriter


class Nonfinite(NamedTuple):
    """A place that has become known not to be finite: number of its first sample, step, call, kind and dotted name of the site."""

    n: int
    step: int
    call: int
    kind: str
    fqn: str


class News:
    """The places that have become known not to be finite for the first time, until somebody takes them.

    Attributes:
        suspicious: whether something that is not finite has become known since this was asked last.
        found: the places.
    """

    def __init__(self, sites: Sites) -> None:
        self.suspicious = False
        self._sites = sites
        self._known: set[int] = set()
        self.found: list[Nonfinite] = []

    def add(self, n: int, step: int, call: int, site: int) -> None:
        """Sample ``n`` is not finite."""
        self.suspicious = True
        if site not in self._known:
            self._known.add(site)
            self.found.append(Nonfinite(n, step, call, *self._sites.kind_and_fqn(site)))

    def take(self) -> list[Nonfinite]:
        """What has become known since this was asked last."""
        found, self.found = self.found, []
        return found


class ImmediateRecorder:
    """Measures each tensor when it is handed over, so that a crash loses no more than the module that was at work.

    Args:
        session: where the samples go.
        sites: numbers the places.
        news: hears of what is not finite.
    """

    def __init__(self, session: Session, sites: Sites, news: News) -> None:
        self._writer, self._position = session.writer, session.position
        self._sites = sites
        self._news = news
        self._known: dict[int, tuple[ref[Tensor], int, Extent]] = {}

    def record(
        self, rows: Rows, when: tuple[int, int, int], source: Source | None = None, given: Sequence[Named] = ()
    ) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also what was ``given`` to ``source``."""
        if self._write(rows, when, of_call=source is not None):
            return
        if source is not None and given:  # whether it came in from outside decides who is to blame
            found = [(self._sites.id_of(source.place, source.looks(path, t)), t) for path, t in given]
            _, step, call = when
            self._write(found, (self._writer.next_n(len(found)), step, call), of_call=False)

    def record_one(
        self, site: int, tensor: Tensor, step: int, call: int, source: Source | None = None, given: Sequence[Named] = ()
    ) -> int:
        """Measures one tensor, a finite one in as few calls of functions as can be: nearly all of a run are such."""
        writer = self._writer
        n = writer.following
        writer.following = n + 1
        extent = self._extent(tensor, of_call=True)
        if extent.finite:
            writer.write_finite(n, step, call, site, extent.absmax)
        else:
            self.record(((site, tensor),), (n, step, call), source, given)
        return n

    def begin_call(self) -> None:
        """Does nothing: what was measured before was forgotten when its call ended."""

    def end_call(self) -> None:
        """Forgets what was measured: a tensor with a weak reference to it cannot be swapped for another, as ``Module.double()`` may do."""
        self._known.clear()

    flush = finish = end_call

    def _write(self, rows: Rows, when: tuple[int, int, int], *, of_call: bool) -> bool:
        lines: list[SampleRow] = []
        finite = True
        n, step, call = when
        for number, (site, tensor) in enumerate(rows, n):
            extent = self._extent(tensor, of_call=of_call)
            if not extent.finite:
                finite = False
                self._news.add(number, step, call, site)
            lines.append((site, extent.absmax, extent.num_nan, extent.num_posinf + extent.num_neginf))
        self._writer.write_samples(*when, lines)
        return finite

    def _extent(self, tensor: Tensor, *, of_call: bool) -> Extent:
        """Measures each distinct tensor once: a container usually returns what its last child returned.

        Only what a module call made is remembered, until the call ends. A parameter or an input outlives it, and must not carry a weak reference.
        """
        held = self._known.get(id(tensor))
        version = version_of(tensor)
        if held is not None and held[0]() is tensor and held[1] == version:
            return held[2]
        here = self._position.of.here or self._position.last
        here.muted += 1
        try:
            extent = measure_one(tensor)
        finally:
            here.muted -= 1
        if of_call:
            self._known[id(tensor)] = (ref(tensor), version, extent)
        return extent


PATIENCE = 5.0
"""Seconds to wait at the end of a run for what is still on its way."""

READ_SECONDS = 0.05
"""How often results are looked for while the program calls no module."""


_Sample = tuple[int, int, int, int, Counts]
"""Sequence number, step, call, site and what was measured."""


_Doubt = tuple[Source, Sequence[tuple[str, torch.dtype, torch.Size, Row]], int, int, int]
"""What went into a module, to be recorded only if something not finite came out: the call, the tensors, their first number, step and call.
A plain tuple, because there is one for each module call and a named one takes a call to make."""


TOGETHER = 32
"""Tensors that are taken in together, at most; fewer where they are large."""

_Waiting = tuple[
    Tensor, int, int, int, tuple[int, int, int, int], Source | None, Sequence[tuple[str, Tensor, int, int]]
]
"""A tensor; its version, address and stream when it was handed over; number, step, call and site of its sample; the call that has returned it;
what went into that, each with its path, version and address."""


class StreamRecorder:
    """The recorder of one CUDA device.

    Args:
        writer: where the samples go.
        sites: numbers the places.
        rows: measures on the device.
        device: the device.
        news: hears of what is not finite.
    """

    def __init__(self, writer: TraceWriter, sites: Sites, rows: DeviceRows, device: torch.device, news: News) -> None:
        self._writer = writer
        self._sites = sites
        self._news = news
        self._device = device
        self._batches = Batches(rows, device)
        self._known: dict[int, tuple[ref[Tensor], Row]] = {}
        """The rows of what the module calls that are running have made, by the identity of the tensor."""
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._confirmed: deque[_Doubt] = deque()
        self._calm: set[int] = set()
        self._restless: set[int] = set()
        self._new: list[tuple[Writes, int]] = []
        self._changed = 0
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None

    def record(
        self, rows: Rows, when: tuple[int, int, int], source: Source | None = None, given: Sequence[Named] = ()
    ) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also what was ``given`` to ``source``."""
        if modes_are_on():
            with out_of_their_sight():
                self.record(rows, when, source, given)
            return
        with self._lock:
            returned = self._hand_over(rows, when, of_call=source is not None)
            if source is not None and given:
                _, step, call = when
                self._doubt(returned, source, given, (self._writer.next_n(len(given)), step, call))
        if self._reader is None:
            self._read_in_background()

    def record_one(
        self, site: int, tensor: Tensor, step: int, call: int, source: Source | None = None, given: Sequence[Named] = ()
    ) -> int:
        """Hands one tensor over.

        Here it is only kept, with what may change until it is taken in. In a row with others that takes a fraction of the time that it
        takes between the operators of a program, and in a forward pass the device may be waiting for the host.
        """
        writer, pending, more = self._writer, self._batches, 1 + len(given)
        n = writer.following
        writer.following = n + more
        stream = pending.current_stream()
        if site not in self._calm or stream not in pending.streams:
            self._take_at_once(site, tensor, (n, step, call), source, given)
        else:
            try:
                versions = [(path, one, version_now(one), one.data_ptr()) for path, one in given]
                one = (tensor, version_now(tensor), tensor.data_ptr(), stream, (n, step, call, site), source, versions)
            except RuntimeError:  # made in inference mode
                self._take_at_once(site, tensor, (n, step, call), source, given)
            else:
                self._waiting.append(one)
                self._waiting_bytes += tensor.nbytes
                if len(self._waiting) >= TOGETHER or self._waiting_bytes >= batches.KEPT_BYTES // 2:
                    with self._lock:
                        self._take_in()
        if self._reader is None:
            self._read_in_background()
        return n

    def _take_at_once(
        self, site: int, tensor: Tensor, when: tuple[int, int, int], source: Source | None, given: Sequence[Named]
    ) -> None:
        """Takes in a tensor that cannot wait."""
        with self._lock:
            returned = self._hand_over(((site, tensor),), when, of_call=True)
            if source is not None and given:
                n, step, call = when
                self._doubt(returned, source, given, (n + 1, step, call))

    def _take_in(self) -> None:
        """Takes in what was only kept so far, in its order; with the lock."""
        waiting, known, put = self._waiting, self._known, self._batches.put
        self._waiting_bytes = 0
        while waiting:
            tensor, version, address, stream, entry, source, given = waiting.popleft()
            held = known.get(id(tensor))
            if held is not None and held[1].version == version and held[0]() is tensor:
                row = held[1]
            else:
                row = put(tensor, version, address, stream)
                known[id(tensor)] = (ref(tensor), row)
            if row.counts is None:
                row.entries += (entry,)
            else:
                self._write([(*entry, row.counts)])
                if not row.suspicious:
                    continue
            if source is not None and given:
                doubted = []
                for path, one, version, address in given:
                    held = known.get(id(one))
                    is_known = held is not None and held[1].version == version and held[0]() is one
                    other = held[1] if held is not None and is_known else put(one, version, address, stream, row)
                    doubted.append((path, one.dtype, one.shape, other))
                n, step, call, _ = entry
                row.doubts += ((source, doubted, n + 1, step, call),)
                if row.counts is not None:
                    self._confirm([row])

    def _hand_over(self, rows: Rows, when: tuple[int, int, int], *, of_call: bool) -> list[Row]:
        """Puts tensors together with what waits. Of a module call they are remembered; what outlives a call must not carry a weak reference."""
        n, step, call = when
        returned = []
        for site, tensor in rows:
            row = self._known_row(tensor)
            if row is None:
                row = self._batches.add(tensor)
                if of_call:
                    self._known[id(tensor)] = (ref(tensor), row)
            returned.append(row)
            if row.counts is not None:
                self._write([(n, step, call, site, row.counts)])
            else:
                row.entries += ((n, step, call, site),)
                if site not in self._calm or row.version < 0:
                    # Launches a tensor of a new site, and of one whose tensors are changed in place, without waiting
                    # for others
                    if site not in self._restless and row.version >= 0:
                        self._calm.add(site)
                        self._new.append((Writes(tensor), site))
                    self._launch()
            n += 1
        return returned

    def _read_in_background(self) -> None:
        """Writes down what has arrived also while the program waits for the device, perhaps for ever."""
        self._ended.clear()

        def read() -> None:
            while not self._ended.wait(READ_SECONDS):
                with self._lock:
                    self._settle()
                    if self._is_idle():  # another begins with the next tensor: a thread that wakes up takes the interpreter from the program
                        self._reader = None
                        return

        self._reader = threading.Thread(target=read, daemon=True, name="dtypedoctor-reader")
        self._reader.start()

    def begin_call(self) -> None:
        """Takes note of the stream that the modules compute on."""
        if self._waiting:
            self._send_all()
        self._batches.begin_call()

    def end_call(self) -> None:
        """Launches everything; writes only if the device is busy, which is about to be given a backward pass."""
        if not self._is_idle():
            self._send_all()

    def flush(self) -> None:
        """Launches everything, and writes what has arrived."""
        if self._is_idle():
            return
        self._send_all()
        with self._lock:
            self._settle()

    def _is_idle(self) -> bool:
        """Whether nothing waits here and nothing is on its way, as always between looks."""
        return not (self._waiting or self._new or self._known or self._batches.holds_any)

    def _send_all(self) -> None:
        if modes_are_on():
            with out_of_their_sight():
                self._send_all()
            return
        with self._lock:
            self._take_in()
            self._launch()
            self._launch()  # what was waiting for gates in the first
            self._set_apart(site for writes, site in self._new if writes.happened)
            self._new.clear()
            # Only now, when all work is queued. A tensor with a weak reference to it cannot be swapped for another, as Module.double() may do.
            self._known.clear()

    def finish(self) -> None:
        """Waits a little for what is on its way, and writes down how much is missing."""
        if (reader := self._reader) is not None:
            self._ended.set()
            reader.join()
            self._reader = None
        self.flush()
        self._write_settled(self._batches.wait(PATIENCE))
        self._confirmed.clear()
        dropped, self._batches.dropped = self._batches.dropped, 0
        if dropped:
            why = (
                "the device stopped before they had arrived" if self._batches.dead else "the device was too far behind"
            )
            self._writer.write(NotWatched(what=f"{dropped} measurements on the device", why=why))
        changed, self._changed = self._changed, 0
        if changed:
            why = "the tensors were changed in place, or freed, before they could be measured"
            self._writer.write(NotWatched(what=f"{changed} measurements on the device", why=why))

    def _known_row(self, tensor: Tensor) -> Row | None:
        """The row of a tensor that was handed over before in the same version: a container usually returns what its last child returned."""
        held = self._known.get(id(tensor))
        if held is None or held[0]() is not tensor:
            return None
        row = held[1]
        return row if row.version < 0 or row.version == version_now(tensor) else None

    def _set_apart(self, sites: Iterable[int]) -> None:
        self._restless.update(sites)
        self._calm -= self._restless

    def _doubt(self, returned: list[Row], source: Source, given: Sequence[Named], when: tuple[int, int, int]) -> None:
        gate = returned[0]
        if gate.counts is not None and not gate.suspicious:
            return
        found = []
        for path, tensor in given:
            if tensor.device == self._device:
                row = self._known_row(tensor) or self._batches.add(tensor, gate)
                found.append((path, tensor.dtype, tensor.shape, row))
        doubt = (source, found, *when)
        for row in returned:
            row.doubts += (doubt,)
        self._confirm([row for row in returned if row.counts is not None and row.suspicious])

    def _launch(self) -> None:
        for row in self._batches.launch():
            self._changed += 1
            self._set_apart(site for _, _, _, site in row.entries)
        if self._batches.worth_reading:
            self._settle()

    def _settle(self) -> None:
        """Writes what has arrived. Takes a microsecond or two for each sample, so it is done when the host has the time."""
        self._write_settled(self._batches.drain())

    def _write_settled(self, rows: list[Row]) -> None:
        if not rows:
            return
        found: list[_Sample] = []
        bad: list[Row] = []
        for row in rows:
            counts = row.counts
            if counts is None:
                continue
            for n, step, call, site in row.entries:
                found.append((n, step, call, site, counts))
            if counts[1] or counts[2]:
                bad.append(row)
        self._write(found)
        self._confirm(sorted(bad, key=lambda row: row.entries))  # a batch measures the newest tensors first
        while self._confirmed and all(row.settled for *_, row in self._confirmed[0][1]):
            self._write_given(self._confirmed.popleft())

    def _confirm(self, rows: Iterable[Row]) -> None:
        """Some rows are not finite: what went into the modules that returned them is to be recorded."""
        for row in rows:
            for n, step, call, site in row.entries:
                self._news.add(n, step, call, site)
            self._confirmed += [doubt for doubt in row.doubts if doubt not in self._confirmed]
            row.doubts = ()

    def _write_given(self, doubt: _Doubt) -> None:
        source, given, n, step, call = doubt
        for i, (path, dtype, shape, row) in enumerate(given):
            read = row.gate is None or row.gate.suspicious
            if row.counts is not None and read:
                looks = Looks(source.phase, "input", path, dtype, shape, source.autocast, self._device)
                self._write([(n + i, step, call, self._sites.id_of(source.place, looks), row.counts)])

    def _write(self, found: list[_Sample]) -> None:
        """Writes samples, those that follow each other in one line, and the lines of a call together."""
        runs: list[tuple[int, list[SampleRow]]] = []
        following, moment = -1, (0, 0)
        for n, step, call, site, (absmax, nan, inf) in sorted(found):
            if step != moment[0] or call != moment[1]:
                if runs:
                    self._writer.write_runs(*moment, runs)
                runs, following, moment = [], -1, (step, call)
            if n != following:
                runs.append((n, []))
            following = n + 1
            runs[-1][1].append((site, absmax, nan, inf))
        if runs:
            self._writer.write_runs(*moment, runs)


BEHIND = frozenset({"cuda"})
"""Device types whose work is queued, so that waiting for a result would cost more than measuring it."""


class Recorders:
    """Hands tensors to the recorder of their device.

    Args:
        session: where the samples go.
        sites: numbers the places.
    """

    def __init__(self, session: Session, sites: Sites) -> None:
        self._writer = session.writer
        self._sites = sites
        self.news = News(sites)
        self._immediate = ImmediateRecorder(session, sites, self.news)
        self._of: dict[torch.device, Recorder] = {}
        self._all: tuple[Recorder, ...] = ()

    def record(
        self, rows: Rows, when: tuple[int, int, int], source: Source | None = None, given: Sequence[Named] = ()
    ) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also what was ``given`` to ``source``."""
        first = rows[0][1].device
        if len({tensor.device for _, tensor in rows}) == 1:
            self.of(first).record(rows, when, source, given)
            return
        n, step, call = when
        for i, row in enumerate(rows):
            self.of(row[1].device).record([row], (n + i, step, call), source, given)

    def note_known(self, site: int, magnitude: float, when: tuple[int, int, int]) -> None:
        """Records a tensor of which nothing is known but its largest magnitude, which is not finite."""
        n, step, call = when
        self._writer.write_samples(n, step, call, [(site, 0.0, int(isnan(magnitude)), int(not isnan(magnitude)))])
        self.news.add(n, step, call, site)

    def of(self, device: torch.device) -> Recorder:
        """The recorder of ``device``, always the same one."""
        return self._of.get(device) or self._begin(device)

    def begin_call(self) -> None:
        """An outermost module call begins."""
        for recorder in self._all:
            recorder.begin_call()

    def end_call(self, *, leads: bool = True) -> None:
        """An outermost module call has ended: sends off what has been put together so far. Never waits.

        Args:
            leads: whether it is the call of the thread that leads; what another one has put together goes with that.
        """
        for recorder in self._all if leads else (self._immediate,):
            recorder.end_call()

    def flush(self) -> None:
        """A pass has ended: sends off what has been put together and writes down what is known. Never waits."""
        for recorder in self._all:
            recorder.flush()

    def finish(self) -> None:
        """Everything measured gets into the trace as far as it can still be had."""
        for recorder in self._all:
            recorder.finish()

    def _begin(self, device: torch.device) -> Recorder:
        found: Recorder = self._immediate
        if device.type in BEHIND:
            found = StreamRecorder(self._writer, self._sites, device_rows(device), device, self.news)
        self._of[device] = found
        self._all = tuple(set(self._of.values()))
        return found
