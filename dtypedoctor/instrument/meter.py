"""Counts what measuring takes, for a budget: the host's seconds in instruments, and the device's for reading what is measured."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.compiler import is_compiling

from dtypedoctor.trace.events import Coverage
from dtypedoctor.unpatched import perf_counter

ADDITIONS, ADDITION_SECONDS = 20_000, 3e-8
"""A loop that tells how fast a host is, and what one of its turns takes on a host on which the following takes so long, about."""
CALL_SECONDS = 1.5e-6
"""Seconds that torch takes to call a hook, before and after the hook's own."""
PASSED_SECONDS = 4e-6
"""Seconds that the hooks of a module call take which is not measured, with what torch takes to call them."""
OPERATOR_SECONDS = 1e-5
"""Seconds that a dispatch mode takes for an operator outside of modules."""
READ_SHARE = 0.75
"""Of the bandwidth that a device's memory has by its clock and width, what the kernel that measures gets (3.6 of 4.8 TB/s on an H200)."""
SLOWEST = 2e11
"""Bytes per second of a device that does not tell its bandwidth."""


class Meter:
    """Adds up seconds.

    Where the device waits for the host, those of the host come on top of a step, and those of the device at most; where it is far behind
    the host, only its own do.

    Attributes:
        coverage: how many module calls have been passed by, and how many operators outside of modules have been seen: too many for a clock.
        device: the device's seconds so far.
        waited: seconds so far in which host and device have worked for a check, one after the other.
        behind: whether the device has been found far behind since somebody has set this to False.
    """

    __slots__ = ("_hooks", "_inside", "_slowness", "behind", "coverage", "device", "waited")

    def __init__(self) -> None:
        self._hooks = self.device = self.waited = 0.0
        self._slowness = min(_seconds_of_additions() for _ in range(3)) / (ADDITIONS * ADDITION_SECONDS)
        self.coverage = Coverage()
        self.behind = self._inside = False

    @property
    def host(self) -> float:
        """The host's seconds so far."""
        seen = self.coverage.module_calls_skipped * PASSED_SECONDS + self.coverage.operators * OPERATOR_SECONDS
        return self._hooks + self._slowness * seen

    def took(self, seconds: float) -> None:
        """Adds some of the host's."""
        self._hooks += seconds

    def timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        """``hook``, with its seconds added; what it calls itself is in them. Inside compiled code, where a clock would break the graph, it is not called."""

        def called(*args: Any) -> None:
            if is_compiling():
                return
            if self._inside:
                hook(*args)
                return
            began = perf_counter()
            try:
                self._inside = True
                hook(*args)
            finally:
                self._inside = False
                self._hooks += perf_counter() - began + self._slowness * CALL_SECONDS

        return called


def _seconds_of_additions() -> float:
    began = perf_counter()
    turns = 0
    while turns < ADDITIONS:
        turns += 1
    return perf_counter() - began


@cache
def bytes_per_second(device: torch.device) -> float:
    """How much of its memory ``device`` reads in a second while it measures."""
    properties = torch.cuda.get_device_properties(device)
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)  # kHz, bits
    return READ_SHARE * 2e3 * clock * width / 8 or SLOWEST
