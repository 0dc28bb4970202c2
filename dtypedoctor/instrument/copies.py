"""Copies of the parameters that a call has computed with, kept on the device until it is known whether all was finite."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from dtypedoctor._torch_private import parameters_of
from dtypedoctor.instrument.alone import parameter_not_here
from dtypedoctor.instrument.live_call import LiveCall
from dtypedoctor.instrument.module_tree import modules_in, parameters_in
from dtypedoctor.instrument.operators import bytes_of
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import out_of_their_sight

__all__ = ["MAX_HELD", "CopiesOfParameters", "ParameterCopies", "share_of_device"]

MAX_HELD = 256 << 20
"""Bytes of inputs and upstream gradients that one call may keep alive."""
SHARE_HELD = 0.02
"""Share of the device's memory that the inputs of kept calls may take together, where that is more than :data:`MAX_HELD`; copies of the parameters
of units may take as much, and so may copies of what an optimizer step begins with."""
SHARE_COPIED = 0.25
"""Share of the memory that is still free on the device beyond which copies of parameters are not allowed to grow."""


def share_of_device() -> int:
    """Bytes that may be kept of one kind: :data:`SHARE_HELD` of the device, at least :data:`MAX_HELD`."""
    if not torch.cuda.is_initialized():
        return MAX_HELD
    return max(MAX_HELD, int(torch.cuda.get_device_properties().total_memory * SHARE_HELD))


class ParameterCopies:
    """Copies of the parameters of a module, made behind the stream: FSDP2 frees the memory of the originals when it reshards them.

    Args:
        module: has all of its parameters at the moment.

    Attributes:
        size: bytes that the copies take.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [
            (parameters_of(part), name, parameter)
            for part in modules_in(module)
            for name, parameter in parameters_of(part).items()
            if parameter is not None
        ]
        distinct = {id(parameter): parameter for *_, parameter in held}
        copies = {
            key: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for key, parameter in distinct.items()
        }
        self._places = [(where, name, copies[id(parameter)]) for where, name, parameter in held]
        self.size = sum(copy.numel() * copy.element_size() for copy in copies.values())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the copies are the module's parameters."""
        before = [(where, name, where[name]) for where, name, _ in self._places]
        try:
            for where, name, copy in self._places:
                where[name] = copy
            yield
        finally:
            for where, name, parameter in before:
                where[name] = parameter


class Copied(Protocol):
    """A call that is kept to be made again, with copies of its parameters where these go away."""

    live: LiveCall
    copies: ParameterCopies | None


class CopiesOfParameters:
    """Keeps copies of what the last units of FSDP2 computed with, until it is known whether all was finite.

    A copy is made behind the stream; nothing waits for it. The one that was used longest ago makes room for the next.

    Args:
        session: of the process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kept: list[Copied] = []
        self._most = 0

    def keep(self, kept: Copied, calls: Sequence[Copied]) -> None:
        """Copies the parameters of a call, which are unsharded at the moment; those of calls that are not among ``calls`` are let go of."""
        if kept.copies is not None:
            self._kept.remove(kept)
            self._kept.append(kept)
            return
        module = kept.live.module
        size = bytes_of(list(parameters_in(module)))
        limit = share_of_device()
        if size == 0 or size > limit or parameter_not_here(module):
            return
        self._drop([one for one in self._kept if one not in calls])
        while self._size() + size > limit:
            self._drop(self._kept[:1])
        if not self._fits(self._size() + size):
            return
        with self._session.position.mute(), out_of_their_sight(), torch.no_grad():
            kept.copies = ParameterCopies(module)
        self._kept.append(kept)

    def forget(self) -> None:
        """Lets go of all copies."""
        self._drop(list(self._kept))

    def _drop(self, calls: list[Copied]) -> None:
        for kept in calls:
            kept.copies = None
            self._kept.remove(kept)

    def _size(self) -> int:
        return sum(kept.copies.size for kept in self._kept if kept.copies is not None)

    def _fits(self, size: int) -> bool:
        """Whether the device has room for copies of ``size`` bytes together; asked only where there were never as many."""
        if size > self._most and torch.cuda.is_initialized():
            free, _ = torch.cuda.mem_get_info()
            if size - self._most > free * SHARE_COPIED:
                return False
        self._most = max(self._most, size)
        return True
