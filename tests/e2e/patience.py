"""How long tests wait for what has to happen: until it happens, and so long that no busy machine makes one fail."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE = 1000.0
"""Seconds after which something that has to happen is given up. Four processes on two cores need a twentieth of it."""


def becomes(holds: Callable[[], object]) -> bool:
    """Whether it comes true before patience is at its end."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def late_with(path: Path) -> Callable[[], float]:
    """A clock like ``time.monotonic`` that is past every time limit as soon as ``path`` exists."""
    true_time = time.monotonic
    return lambda: true_time() + 1e6 * path.exists()


def read_to_end(terminal: int) -> bytes:
    """What is written to the other end of a terminal until its last user has gone; one read gives what has arrived, not all."""
    written = b""
    with suppress(OSError):  # Linux's way of saying that nobody is left
        while part := os.read(terminal, 65536):
            written += part
    return written
