"""Single numbers from a device (a loss, a loss scale), read without making the program wait for them."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtypedoctor.instrument.readable import values_of
from dtypedoctor.instrument.statistics import measurable, out_of_their_sight
from dtypedoctor.interruptions import is_interruption

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
            number: a Python number or a tensor of one element, on any device; nothing is called for one that cannot be read.
            then: what is to be done with it.
        """
        if not isinstance(number, Tensor):
            self._awaited.append(_Awaited(None, None, lambda: then(number)))
            self.settle()
            return
        with out_of_their_sight():  # neither modes of the program nor its own tensor classes are to see that it is read
            here = number if type(number) is Tensor and measurable(number) else values_of(number)
            if here is None:
                return
            if here.is_cuda:
                copy = torch.empty(here.shape, dtype=here.dtype, pin_memory=True)
                copy.copy_(here.detach(), non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(here.device))
                self._awaited.append(_Awaited(copy, event, then))
            else:
                value = float(here.detach())
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
            except RuntimeError as error:
                if is_interruption(error):
                    raise
                continue
            self._call(awaited)

    def _call(self, awaited: _Awaited) -> None:
        if awaited.copy is None:
            awaited.then()
        else:
            awaited.then(float(awaited.copy))
