"""Which tensors outside of modules are read as soon as they have come about: on a CPU all; on a GPU, where a reading waits for the device, some."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist

FIRST_STEPS = 8
"""Training steps in which a GPU is read from, besides those whose number is a power of 2. A program without an optimizer is in its first."""
FIRST_CHECKS = 4
"""Rounds, and steps, that are compared: 1 to 4, and then each power of two."""
WINDOW, FROM = 4, 16
"""Steps after each of these in which state is looked at as well, so that it goes through several rounds; from which one on."""
EACH_STEP = 2_000
"""Readings of a GPU in one step: of the 50 µs or so that the host waits for each, 0.1 s."""
OVERALL = 40_000
"""Readings of a GPU in one run."""
AT_HAND, WAITED_FOR = frozenset({"cpu"}), frozenset({"cuda"})
"""Devices whose memory is read at any time, and those for which a reading waits; of others nothing is read."""


def is_checked(number: int) -> bool:
    """Whether the round or the step with this number, from 1, is compared."""
    return number <= FIRST_CHECKS or number.bit_count() == 1


def is_in_window(number: int) -> bool:
    """Whether the step with this number is compared, or follows closely on a later one that is."""
    before = range(max(FROM, number - WINDOW), number)
    return is_checked(number) or any(map(is_checked, before))


def is_read_in(step: int) -> bool:
    """Whether a GPU is read from in a training step."""
    return step <= FIRST_STEPS or step.bit_count() == 1


class Readings:
    """Says of each tensor whether it may be read now.

    Args:
        step: tells the training step.

    Attributes:
        made: readings of a GPU so far.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._now = step
        self._step = 0
        self._in_step = 0
        self.made = 0

    @staticmethod
    def at_hand(tensor: Tensor) -> bool:
        """Whether nobody waits where it is read."""
        return tensor.device.type in AT_HAND

    def may_read(self, tensor: Tensor) -> bool:
        """Whether this is a step in which tensors on its device are read."""
        waited_for = tensor.device.type in WAITED_FOR and is_read_in(self._now())
        return self.at_hand(tensor) or (waited_for and self._may_wait())

    def reads(self, tensor: Tensor) -> bool:
        """Whether a tensor is read that is one of many: in all steps on a CPU, in some on a GPU."""
        return self.may_read(tensor) and self.affords(tensor)

    def affords(self, tensor: Tensor) -> bool:
        """Whether a tensor is read that is one of few."""
        if self.at_hand(tensor):
            return True
        if tensor.device.type not in WAITED_FOR or not self._may_wait():
            return False
        if self._step != (step := self._now()):
            self._step, self._in_step = step, 0
        if self._in_step >= EACH_STEP or self.made >= OVERALL:
            return False
        self._in_step += 1
        self.made += 1
        return True

    @staticmethod
    def _may_wait() -> bool:
        """Whether the program lets the host wait for the device: it captures no graph, has not asked torch to tell of each time, and is no rank of a
        job, whose device may wait for what another rank's host has not begun yet."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return False
        if not torch.cuda.is_initialized():
            return True
        return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0
