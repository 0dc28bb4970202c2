"""Runs a compiled model once more without the compiler, on what it was just given.

Only for a second pass: a call that is made twice moves whatever state the model keeps.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.statistics import Extent, measure
from dtypedoctor.trace.records.compiling import EagerCall


class EagerReplay:
    """Writes an :class:`EagerCall` for the outermost calls with the given numbers.

    Args:
        notes: where the observations go.
        position: tells the call.
        calls: the calls to make again.
    """

    def __init__(self, notes: Notes, position: Position, calls: Collection[int]) -> None:
        self._notes = notes
        self._position = position
        self._calls = calls

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call has returned."""
        if self._position.call not in self._calls or self._position.backward_depth:
            return
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with (
            self._position.mute(),
            torch.random.fork_rng(devices=devices),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            again = module(*args, **kwargs)
        real, eager = _extents(output), _extents(again)
        compared = EagerCall(
            finite=all(e.finite for e in real),
            absmax=max((e.absmax for e in real), default=0.0),
            eager_finite=all(e.finite for e in eager),
            eager_absmax=max((e.absmax for e in eager), default=0.0),
        )
        self._notes.write(compared, "")


def _extents(output: Any) -> list[Extent]:
    return measure([tensor for _, tensor in tensors_in(output)])
