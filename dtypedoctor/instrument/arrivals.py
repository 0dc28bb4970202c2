"""Single numbers from a device (a loss, a loss scale), read without making the program wait for them."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtypedoctor.instrument.statistics import local_part, out_of_their_sight

Then = Callable[[float], None]


class _Awaited(NamedTuple):
    """A number on its way into page-locked memory; without one, something that waits for those before it."""

    copy: Tensor | None
    event: Any
    then: Callable[..., None]


class Arrivals:
    """Calls back with numbers when they are in the host's memory, in the order in which they were asked for.

    On a CPU that is at once. On a CUDA device the number is copied behind the work that makes it, and looked for at the next
    request, at :meth:`settle` and at the end.
    """

    def __init__(self) -> None:
        self._awaited: deque[_Awaited] = deque()

    def ask(self, number: Tensor | float, then: Then) -> None:
        """Has ``then`` called with a number.

        Args:
            number: a Python number or a tensor of one element, on any device.
            then: what is to be done with it.
        """
        if isinstance(number, Tensor) and number.is_cuda:
            with out_of_their_sight():
                here = local_part(number).detach()
                copy = torch.empty(here.shape, dtype=here.dtype, pin_memory=True)
                copy.copy_(here, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(number.device))
            self._awaited.append(_Awaited(copy, event, then))
        else:
            value = float(number.detach()) if isinstance(number, Tensor) else number
            self._awaited.append(_Awaited(None, None, lambda: then(value)))
        self.settle()

    def afterwards(self, then: Callable[[], None]) -> None:
        """Has ``then`` called when everything that was asked for before has arrived."""
        self._awaited.append(_Awaited(None, None, then))
        self.settle()

    def settle(self) -> None:
        """Calls back with what has arrived. Never waits.

        Raises:
            RuntimeError: the device does not answer any more.
        """
        while self._awaited and (self._awaited[0].event is None or self._awaited[0].event.query()):
            self._call(self._awaited.popleft())

    def finish(self) -> None:
        """The run is over: waits for what is on its way. What a dead device owes is given up; the rest is called. Never raises."""
        while self._awaited:
            awaited = self._awaited.popleft()
            try:
                if awaited.event is not None:
                    awaited.event.synchronize()
            except RuntimeError:
                continue
            self._call(awaited)

    def _call(self, awaited: _Awaited) -> None:
        if awaited.copy is None:
            awaited.then()
        else:
            awaited.then(float(awaited.copy))
