"""Follows autocast regions in forward and backward.

Below the dispatcher ``torch.is_autocast_enabled()`` always answers False, so the regions are followed where they are
entered: the context manager class itself, which ``custom_bwd`` also uses to restore the forward's state.
"""

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from dtypedoctor._torch_private import region_is_on
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.observing import observe
from dtypedoctor.instrument.position import Position, is_foreign
from dtypedoctor.trace.records.execution import AutocastRegion
from dtypedoctor.trace.writer import TraceWriter

MAX_REGIONS = 100
"""Different regions that are told of."""


class _OfThread(threading.local):
    """The regions that are open in each thread that Python has started; in those of autograd the ones of the first thread."""

    def __init__(self, first: list[AutocastRegion]) -> None:
        self.regions = first if is_foreign() else []


class AutocastLog:
    """Knows the innermost autocast region per device type while started.

    Attributes:
        entered: called with each region that is entered.
    """

    def __init__(self) -> None:
        first: list[AutocastRegion] = []
        self._of = _OfThread(first)
        self._of.regions = first
        self._undo: list[Callable[[], None]] = []
        self.entered: list[Callable[[AutocastRegion], None]] = []

    @property
    def _regions(self) -> list[AutocastRegion]:
        return self._of.regions

    def start(self) -> None:
        """Begins to follow regions; of those already open, the innermost of each device type is known."""
        self._regions[:] = list(_already_open())
        enter, leave = autocast.__enter__, autocast.__exit__

        def __enter__(region: autocast) -> Any:  # noqa: N807
            result = enter(region)
            if not torch.compiler.is_compiling():
                self._note(region)
            return result

        def __exit__(  # noqa: N807
            region: autocast, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
        ) -> Any:
            if self._regions and not torch.compiler.is_compiling():
                self._regions.pop()
            return leave(region, kind, error, tb)

        autocast.__enter__ = __enter__  # type: ignore[method-assign]
        autocast.__exit__ = __exit__  # type: ignore[method-assign]

        def undo() -> None:
            autocast.__enter__ = enter  # type: ignore[method-assign]
            autocast.__exit__ = leave  # type: ignore[method-assign]

        self._undo.append(undo)

    def stop(self) -> None:
        """Puts the context manager back as it was."""
        while self._undo:
            self._undo.pop()()

    def _note(self, region: autocast) -> None:
        found = AutocastRegion(
            device=region.device,
            wanted=str(region.fast_dtype).removeprefix("torch."),
            enabled=region_is_on(region),
            source=source_of(sys._getframe(2)),
        )
        self._regions.append(found)
        for listener in self.entered:
            listener(found)

    def dtype(self, device: str) -> str | None:
        """The autocast dtype in force for ``device`` (``cpu``, ``cuda``), or None."""
        regions = self._of.regions
        if not regions:
            return None
        return next((region.dtype for region in reversed(regions) if region.device == device), None)

    @property
    def open_regions(self) -> tuple[AutocastRegion, ...]:
        """Every region that is open, outermost first."""
        return tuple(self._regions)


class RegionLog:
    """Writes each different region that is entered."""

    def __init__(self, writer: TraceWriter, position: Position) -> None:
        self._writer = writer
        self._position = position
        self._told: set[AutocastRegion] = set()

    def tell(self, region: AutocastRegion) -> None:
        """A region is entered."""
        if region in self._told or len(self._told) >= MAX_REGIONS:
            return
        self._told.add(region)
        observe(self._writer, self._position, region)


def _already_open() -> list[AutocastRegion]:
    return [
        AutocastRegion(
            device=d, wanted=str(torch.get_autocast_dtype(d)).removeprefix("torch."), enabled=True, source=None
        )
        for d in ("cpu", "cuda")
        if torch.is_autocast_enabled(d)
    ]
