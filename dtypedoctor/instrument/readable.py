"""What can be measured of a program, how much of it was, and single numbers from a device.

Tensors of a class of their own, spread, sparse, nested or complex ones have values that can be read though they are no plain dense
memory. :class:`Arrivals` reads a loss or a loss scale without waiting for it.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import (
    DisableTorchFunction,
    is_plain_inside,
    is_wrapped,
    jagged_values,
    kind_of,
    local_shard,
    stored_values,
    unwrapped,
)
from dtypedoctor.instrument.statistics import is_spread, local_part, measurable, modes_are_on, out_of_their_sight
from dtypedoctor.interruptions import is_interruption

_NOT_PLAIN = "its values are not plain memory, and its class's own code would have to run to read them"
_CAPTURED = "nothing can be read while a CUDA graph is captured; run once without the graph to have it measured"
_LAYOUT = "its memory layout cannot be read"


_WHOLE = frozenset({torch.int64, torch.int32, torch.bool, torch.uint8})


class Missed(NamedTuple):
    """Something that cannot be measured: the name of its type, and why."""

    type: str
    why: str


def readable(tensor: Tensor) -> Tensor | Missed | None:
    """The values of ``tensor`` as a measurable tensor on the same memory; why not; or None where it holds no floats.

    No code of the tensor's class runs. A DTensor gives what this process holds of it, a sparse tensor the values that it stores,
    a complex one real and imaginary parts, one inside of ``vmap`` or ``grad`` what is behind it. Never communicates.
    """
    if type(tensor) is Tensor and tensor.dtype in _WHOLE:
        return None
    if modes_are_on():
        with out_of_their_sight():
            return readable(tensor)
    with DisableTorchFunction(), torch.no_grad():
        values = _of_class(tensor)
        if isinstance(values, Missed):
            return values
        while is_wrapped(values):
            values = unwrapped(values)
        if values.is_meta or not (values.is_floating_point() or values.is_complex()):
            return None
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            return Missed(type(tensor).__name__, _CAPTURED)
        found = _dense(values)
        return found if found is not None and measurable(found) else Missed(type(tensor).__name__, _LAYOUT)


def values_of(tensor: Tensor) -> Tensor | None:
    """The values of ``tensor`` as a measurable tensor on the same memory; None where it cannot be measured, or holds no floats."""
    found = tensor if measurable(tensor) else readable(tensor)
    return found if isinstance(found, Tensor) else None


def held_values(tensor: Tensor) -> Tensor | None:
    """What this process holds of the values of ``tensor``, as :func:`values_of` gives them."""
    held = tensor if type(tensor) in (Tensor, nn.Parameter) else local_part(tensor)
    return values_of(held)


def wants_gradient(tensor: Tensor) -> bool:
    """Whether a gradient of ``tensor`` will come that a hook can see: it is in the graph, and no leaf, where the hook would stay."""
    if type(tensor) is not Tensor:
        with DisableTorchFunction():
            return tensor.requires_grad and not tensor.is_leaf
    return not is_wrapped(tensor) and tensor.requires_grad and not tensor.is_leaf


def _of_class(tensor: Any) -> Any:
    """The tensor behind one of a class of its own, on no device where there is no data at all; or why it cannot be had."""
    if is_wrapped(tensor):
        return tensor
    if is_spread(tensor):
        tensor = local_shard(tensor)
    kind = type(tensor)
    if is_plain_inside(kind):
        return Tensor.detach(tensor)
    of_torch = kind_of(kind)
    if of_torch == "fake":
        return torch.empty(0, device="meta")
    if of_torch == "async" and tensor.completed:
        return _of_class(tensor.elem)
    if of_torch == "nested" and (values := jagged_values(tensor)) is not None:
        return Tensor.detach(values)
    return Missed(kind.__name__, _NOT_PLAIN)


def _dense(tensor: Tensor) -> Tensor | None:
    if tensor.is_nested:
        tensor = tensor.values()
    elif tensor.layout is torch.sparse_coo:
        tensor = stored_values(tensor)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    elif tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor.detach()


Then = Callable[[float], None]


_Room = tuple[torch.device, torch.dtype, torch.Size]
"""Where a number comes from, and what it looks like: what has been awaited once can be awaited again in the same memory."""


class _Awaited(NamedTuple):
    """A number on its way into page-locked memory; without one, something that waits for those before it."""

    copy: Tensor | None
    event: Any
    then: Callable[..., None]
    room: "_Room | None" = None


class Arrivals:
    """Calls back with numbers when they are in the host's memory, in the order in which they were asked for.

    On a CPU that is at once. On a CUDA device the number is copied behind the work that makes it, and looked for at the next
    request, at :meth:`settle` and at the end.
    """

    def __init__(self) -> None:
        self._awaited: deque[_Awaited] = deque()
        self._rooms: dict[_Room, list[tuple[Tensor, Any]]] = {}
        """Page-locked memory and events that nothing is awaited in."""

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
                self._await(here.detach(), lambda copy: then(float(copy)))
            else:
                value = float(here.detach())
                self._awaited.append(_Awaited(None, None, lambda: then(value)))
        self.settle()

    def ask_each(self, numbers: Tensor, then: Callable[[list[float]], None]) -> None:
        """Has ``then`` called with each number of a vector on a device; out of sight of modes."""
        self._await(numbers, lambda copy: then(copy.tolist()))
        self.settle()

    def _await(self, numbers: Tensor, then: Callable[[Tensor], None]) -> None:
        room = (numbers.device, numbers.dtype, numbers.shape)
        rooms = self._rooms.setdefault(room, [])
        copy, event = (
            rooms.pop()
            if rooms
            else (torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True), torch.cuda.Event())
        )
        copy.copy_(numbers, non_blocking=True)
        event.record(torch.cuda.current_stream(numbers.device))
        self._awaited.append(_Awaited(copy, event, then, room))

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

    def finish(self) -> RuntimeError | None:
        """Waits for what is on its way, since the run is over. What a dead device owes is given up; the rest is called.

        Returns:
            What the device said where it does not answer any more.
        """
        silent = None
        while self._awaited:
            awaited = self._awaited.popleft()
            try:
                if awaited.event is not None:
                    awaited.event.synchronize()
            except RuntimeError as error:
                if is_interruption(error):
                    raise
                silent = error
                continue
            self._call(awaited)
        return silent

    def _call(self, awaited: _Awaited) -> None:
        if awaited.copy is None or awaited.room is None:
            awaited.then()
        else:
            awaited.then(awaited.copy)
            self._rooms[awaited.room].append((awaited.copy, awaited.event))
