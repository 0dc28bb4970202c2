"""Follows autocast regions in forward and backward.

Below the dispatcher ``torch.is_autocast_enabled()`` always answers False, so the regions are followed where they are
entered: the context manager class itself, which ``custom_bwd`` also uses to restore the forward's state.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.amp.autocast_mode import autocast


class AutocastLog:
    """Knows the innermost autocast region per device type while started."""

    def __init__(self) -> None:
        self._regions: list[tuple[str, str | None]] = []
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begins to follow regions; regions that are already open stay unknown."""
        enter, leave = autocast.__enter__, autocast.__exit__
        regions = self._regions

        def __enter__(region: autocast) -> Any:  # noqa: N807
            result = enter(region)
            dtype = str(region.fast_dtype).removeprefix("torch.") if region._enabled else None
            regions.append((region.device, dtype))
            return result

        def __exit__(  # noqa: N807
            region: autocast, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
        ) -> Any:
            if regions:
                regions.pop()
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

    def dtype(self, device: str) -> str | None:
        """The autocast dtype in force for ``device`` (``cpu``, ``cuda``), or None."""
        for where, dtype in reversed(self._regions):
            if where == device:
                return dtype
        return None

    @property
    def innermost(self) -> str | None:
        """The dtype of the innermost region, whatever its device; None outside of any."""
        return self._regions[-1][1] if self._regions else None
