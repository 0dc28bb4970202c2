"""Keeps the instruments' own errors away from the program that they watch, and nothing else."""

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from dtypedoctor._torch_private import DisableTorchFunction, function_mode_is_on, set_grad_enabled
from dtypedoctor.instrument.position import Position
from dtypedoctor.interruptions import contained, is_interruption
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.events import FAILED_THERE, NotWatched
from dtypedoctor.trace.writer import TraceWriter

grad_is_enabled = torch.is_grad_enabled

MAX_TOLD = 50
"""Different things that are reported as not watched; a program can have any number of modules."""


class Guard:
    """Calls instruments so that nothing they raise reaches the program.

    What a signal handler of the program raises while an instrument is at work, or another thread sends, passes unchanged
    (:mod:`dtypedoctor.interruptions`); what was muted for the instrument's own work is not muted any more then, and autograd is
    on or off as it was. A ``with`` block does not see to that: its ``__exit__`` may be what is interrupted.

    Args:
        writer: where what went unwatched is recorded, once each.
        position: nothing is called while it is muted.
    """

    def __init__(self, writer: TraceWriter, position: Position) -> None:
        self._writer = writer
        self._position = position
        self._told: set[str] = set()

    def shield(self, callback: Callable[..., Any], what: str) -> Callable[..., None]:
        """``callback`` as a hook that returns nothing, raises nothing of its own, and stands still inside compiled code.

        Every way from the program into the instruments leads through here, or through :meth:`keeping`.

        Args:
            callback: the instrument.
            what: what goes unwatched where it fails, in words.
        """
        position = self._position

        def hook(*args: Any) -> None:
            if is_compiling() or (position.of.here or position.last).muted:
                return
            if position.silenced:
                position.silent_work()
                return
            if function_mode_is_on():  # the program's own, which is to see what the program does and nothing else
                with DisableTorchFunction():
                    hook(*args)
                return
            grad = grad_is_enabled()
            try:
                callback(*args)
            except BaseException as error:  # a defect of ours must not become the program's; all else is raised again
                position.unmute()
                if grad_is_enabled() is not grad:
                    set_grad_enabled(grad)
                if is_interruption(error):
                    raise
                self.failed(what, error)

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch warns of other hooks when it pickles a tensor
        return hook

    def keeping(self, what: str) -> contained:
        """A context in which errors of ours are kept from the program: the same as :meth:`shield` for a few lines."""
        return contained(lambda error: self.failed(what, error))

    def failed(self, what: str, error: BaseException) -> None:
        """Records that ``what`` is not watched because of a defect of ours.

        Raises:
            Exception: ``error`` itself, where it is an interruption.
        """
        if is_interruption(error):
            raise error
        with contained() as text:
            message = elided(str(error))[:200]  # runs code of its class, which may be the program's
        self.tell(what, f"{FAILED_THERE} with {type(error).__name__}: {message if not text.error else '?'}")

    def tell(self, what: str, why: str) -> None:
        """Records that ``what`` is not watched."""
        if what in self._told or len(self._told) >= MAX_TOLD:
            return
        self._told.add(what)
        with contained(
            lambda _: self._writer.disown()
        ):  # closed, say: nothing can be recorded, and the program goes on
            self._writer.write(NotWatched(what=what, why=why))
