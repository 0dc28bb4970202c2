"""Counts what a corrective kernel did, without waiting for the device."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Counters:
    """What a correction did. Element counts stay on the device until they are read, so counting never synchronises."""

    hits: int = 0
    paused: bool = False
    """While True nothing is counted (the probe batch is not part of the run)."""
    _elements: dict[str, torch.Tensor] = field(default_factory=dict)

    def hit(self) -> None:
        """Counts one use of the corrective path."""
        if not self.paused:
            self.hits += 1

    def add(self, name: str, mask: torch.Tensor) -> None:
        """Adds the number of True elements of ``mask`` (bool, any shape) to the counter ``name``."""
        if self.paused:
            return
        count = mask.sum(dtype=torch.int64)
        held = self._elements.get(name)
        self._elements[name] = count if held is None else held + count.to(held.device)

    def elements(self, name: str) -> int:
        """The value of the counter ``name``; waits for the device."""
        held = self._elements.get(name)
        return 0 if held is None else int(held.item())
