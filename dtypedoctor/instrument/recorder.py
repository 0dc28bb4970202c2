"""Measures tensors and gets the numbers into the trace: at once on a CPU, behind the stream on a GPU."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import ref

from torch import Tensor

from dtypedoctor._torch_private import version_of
from dtypedoctor.instrument.places import Place
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.sites import Looks, Sites
from dtypedoctor.instrument.statistics import Extent, Named, measure_one
from dtypedoctor.trace.writer import SampleRow, TraceWriter

Rows = Sequence[tuple[int, Tensor]]
"""Tensors to be measured, each with the number of its site."""


class When(NamedTuple):
    """Coordinates of samples.

    Attributes:
        n: sequence number of the first of them; those of the others follow.
    """

    n: int
    step: int
    call: int


class Source(NamedTuple):
    """The call of a module that tensors went into. Their sites are described only where they are needed."""

    place: Place
    phase: str
    autocast: str | None

    def looks(self, path: str, tensor: Tensor) -> Looks:
        """How one of the tensors looks as a sample."""
        return Looks(self.phase, "input", path, tensor.dtype, tensor.shape, self.autocast, tensor.device)


class Recorder(Protocol):
    """Measures what it is given on one device.

    Attributes:
        suspicious: set when something is found not to be finite.
    """

    suspicious: bool

    def record(
        self, rows: Rows, when: tuple[int, int, int], source: Source | None = None, given: Sequence[Named] = ()
    ) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also what was ``given`` to ``source``.

        Args:
            rows: what is measured.
            when: the same as :class:`When`, which takes a third of a microsecond to make.
            source: the call that has returned ``rows``.
            given: what went into it.
        """

    def begin_call(self) -> None:
        """An outermost module call begins."""

    def end_call(self) -> None:
        """An outermost module call has ended: sends off what has been put together so far. Never waits."""

    def flush(self) -> None:
        """A pass has ended: sends off what has been put together and writes down what is known. Never waits."""

    def finish(self) -> None:
        """The run is over: everything measured gets into the trace as far as it can still be had. Never raises."""


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

    def record(
        self, rows: Rows, when: tuple[int, int, int], source: Source | None = None, given: Sequence[Named] = ()
    ) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also what was ``given`` to ``source``."""
        if self._write(rows, when):
            return
        self.suspicious = True
        if source is not None and given:  # whether it came in from outside decides who is to blame
            found = [(self._sites.id_of(source.place, source.looks(path, t)), t) for path, t in given]
            _, step, call = when
            self._write(found, (self._writer.next_n(len(found)), step, call))

    def begin_call(self) -> None:
        """Forgets what was measured: from here on it is another call's."""
        self._known.clear()

    def end_call(self) -> None:
        """Does nothing: everything has been written."""

    def flush(self) -> None:
        """Does nothing: everything has been written."""

    def finish(self) -> None:
        """Does nothing: everything has been written."""

    def _write(self, rows: Rows, when: tuple[int, int, int]) -> bool:
        lines: list[SampleRow] = []
        finite = True
        for site, tensor in rows:
            extent = self._extent(tensor)
            finite = finite and extent.finite
            lines.append((site, extent.absmax, extent.num_nan, extent.num_posinf + extent.num_neginf))
        self._writer.write_samples(*when, lines)
        return finite

    def _extent(self, tensor: Tensor) -> Extent:
        """Measures each distinct tensor once: a container usually returns what its last child returned."""
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
        self._known[id(tensor)] = (ref(tensor), version, extent)
        return extent
