"""Keeps the instruments' own errors away from the program that they watch."""

from collections.abc import Callable
from typing import Any

import torch

from dtypedoctor.instrument.position import Position
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.writer import TraceWriter

MAX_TOLD = 50
"""Different things that are reported as not watched; a program can have any number of modules."""


class Guard:
    """Calls instruments so that nothing they raise reaches the program.

    Args:
        writer: where what went unwatched is recorded, once each.
        position: nothing is called while it is muted.
    """

    def __init__(self, writer: TraceWriter, position: Position) -> None:
        self._writer = writer
        self._position = position
        self._told: set[str] = set()

    def shield(self, callback: Callable[..., Any], what: str) -> Callable[..., None]:
        """``callback`` as a hook that returns nothing, raises nothing, and stands still inside compiled code.

        Args:
            callback: the instrument.
            what: what goes unwatched where it fails, in words.
        """

        def hook(*args: Any) -> None:
            if torch.compiler.is_compiling() or self._position.muted:
                return
            try:
                callback(*args)
            except Exception as error:  # noqa: BLE001  (a defect of ours must not become the program's)
                self.failed(what, error)

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch warns of other hooks when it pickles a tensor
        return hook

    def failed(self, what: str, error: Exception) -> None:
        """Records that ``what`` is not watched because of a defect of ours."""
        self.tell(what, f"dtypedoctor failed there with {type(error).__name__}: {str(error)[:200]}")

    def tell(self, what: str, why: str) -> None:
        """Records that ``what`` is not watched."""
        if what in self._told or len(self._told) >= MAX_TOLD:
            return
        self._told.add(what)
        try:
            self._writer.write(NotWatched(what=what, why=why))
        except Exception:  # noqa: BLE001  (no space left, closed: nothing can be recorded, and the program goes on)
            self._writer.disown()
