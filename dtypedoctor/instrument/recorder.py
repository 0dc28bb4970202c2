"""Measures tensors and gets the numbers into the trace: at once on a CPU, behind the stream on a GPU."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import ref

from torch import Tensor

from dtypedoctor.instrument.places import Place
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.sites import Looks, Sites
from dtypedoctor.instrument.statistics import Extent, measure_one
from dtypedoctor.trace.writer import SampleRow, TraceWriter


class Item(NamedTuple):
    """A tensor to be measured and where it is found."""

    place: Place
    looks: Looks
    tensor: Tensor


class When(NamedTuple):
    """Coordinates that samples get instead of those of the moment.

    Attributes:
        n: sequence number of the first of them; those of the others follow.
    """

    n: int
    step: int
    call: int


class Recorder(Protocol):
    """Measures what it is given on one device.

    Attributes:
        suspicious: set when something is found not to be finite.
    """

    suspicious: bool

    def record(self, items: Sequence[Item], given: Sequence[Item] = (), when: When | None = None) -> None:
        """Measures ``items`` and, only if one of them is not finite, also ``given``."""

    def begin_call(self) -> None:
        """An outermost module call begins."""

    def flush(self) -> None:
        """A natural pause: sends off what has been put together so far. Never waits."""

    def finish(self) -> None:
        """The run is over: everything measured gets into the trace as far as it can still be had. Never raises."""


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to in place, -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


class ImmediateRecorder:
    """Measures each tensor when it is handed over, so that a crash loses no more than the module that was at work.

    Args:
        writer: where the samples go.
        position: shared coordinates.
        sites: numbers the places.
    """

    def __init__(self, writer: TraceWriter, position: Position, sites: Sites) -> None:
        self._writer = writer
        self._position = position
        self._sites = sites
        self._known: dict[int, tuple[ref[Tensor], int, Extent]] = {}
        self.suspicious = False

    def record(self, items: Sequence[Item], given: Sequence[Item] = (), when: When | None = None) -> None:
        """Measures ``items`` and, only if one of them is not finite, also ``given``."""
        if self._write(items, when):
            return
        self.suspicious = True
        if given:  # whether it came in from outside decides who is to blame
            self._write(given, None)

    def begin_call(self) -> None:
        """Forgets what was measured: from here on it is another call's."""
        self._known.clear()

    def flush(self) -> None:
        """Does nothing: everything has been written."""

    def finish(self) -> None:
        """Does nothing: everything has been written."""

    def _write(self, items: Sequence[Item], when: When | None) -> bool:
        rows: list[SampleRow] = []
        finite = True
        for place, looks, tensor in items:
            extent = self._extent(tensor)
            finite = finite and extent.finite
            rows.append(
                (self._sites.id_of(place, looks), extent.absmax, extent.num_nan, extent.num_posinf + extent.num_neginf)
            )
        if rows:
            position = self._position
            when = when or When(self._writer.next_n(len(rows)), position.step, position.call)
            self._writer.write_samples(*when, rows)
        return finite

    def _extent(self, tensor: Tensor) -> Extent:
        """Measures each distinct tensor once: a container usually returns what its last child returned."""
        held = self._known.get(id(tensor))
        version = version_of(tensor)
        if held is not None and held[0]() is tensor and held[1] == version:
            return held[2]
        self._position.muted += 1
        try:
            extent = measure_one(tensor)
        finally:
            self._position.muted -= 1
        self._known[id(tensor)] = (ref(tensor), version, extent)
        return extent
