"""Compares the stream that a kernel launcher chooses with the stream that is current at that moment.

Work launched on another stream is not ordered with what the current stream does before and after it, and a stream of
another device belongs to memory that the kernel does not write to (public description:
https://github.com/thad0ctor/axolotl/pull/25). Neither raises where it happens.
"""

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

Chooser = Callable[[torch.device], ctypes.c_void_p]


def current_handle(device: torch.device) -> int:
    """Handle of the CUDA stream that is current on ``device``; 0 is the default stream."""
    return torch.cuda.current_stream(device).cuda_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUse:
    """Launches that were alike.

    Attributes:
        device: the device whose memory was worked on.
        used: handle of the stream that was launched on.
        current: handle of the stream that was current on ``device``.
        count: number of launches.
    """

    device: str
    used: int
    current: int
    count: int

    @property
    def stale(self) -> bool:
        """Whether the launch went to another stream than the current one."""
        return self.used != self.current


class StreamWatch:
    """Listens to a function ``(device) -> stream handle`` of a module while it is entered.

    Args:
        owner: the module that holds the function.
        name: its name there; callers must look it up at each call.
        current: tells the current stream's handle.
    """

    def __init__(self, owner: Any, name: str, current: Callable[[torch.device], int] = current_handle) -> None:
        self._owner = owner
        self._name = name
        self._current = current
        self._original: Chooser | None = None
        self._seen: Counter[tuple[str, int, int]] = Counter()

    def __enter__(self) -> Self:
        original: Chooser = getattr(self._owner, self._name)
        self._original = original

        def watched(device: torch.device) -> ctypes.c_void_p:
            chosen = original(device)
            self._seen[str(device), chosen.value or 0, self._current(device)] += 1
            return chosen

        setattr(self._owner, self._name, watched)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        setattr(self._owner, self._name, self._original)

    def uses(self) -> tuple[StreamUse, ...]:
        """What was launched where, most frequent first."""
        return tuple(
            StreamUse(device=device, used=used, current=current, count=count)
            for (device, used, current), count in self._seen.most_common()
        )
