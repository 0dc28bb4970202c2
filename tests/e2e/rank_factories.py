"""Model factories that tests name as ``rank_factories:NAME``: what happens to one rank of two."""

import multiprocessing
import os
import signal
import time

from bisect_factories import Plain, Tower
from torch import Tensor, nn


class Killed(Plain):
    """Takes its process with it on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Terminated(Plain):
    """Sends itself SIGTERM on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)


class Gone(Plain):
    """Leaves on rank 1 as if all were well."""

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1":
            os._exit(0)
        return super().forward(x)


class Stuck(Plain):
    """Goes on for ever on rank 1, and the other one waits for it."""

    def forward(self, x: Tensor) -> Tensor:
        while os.environ.get("RANK") == "1":
            time.sleep(0.1)
        return super().forward(x)


class Raising(Plain):
    """Raises on rank 1 alone."""

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1":
            raise ValueError("no room on rank 1")
        return super().forward(x)


def killed() -> nn.Module:
    """Two blocks, the second of which ends rank 1."""
    return Tower(Plain(), Killed())


def terminated() -> nn.Module:
    """Two blocks, the second of which has rank 1 end."""
    return Tower(Plain(), Terminated())


def gone() -> nn.Module:
    """Two blocks, the second of which leaves on rank 1."""
    return Tower(Plain(), Gone())


def accompanied() -> nn.Module:
    """A healthy model whose process has a daemon, which would go on for long."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
    return Tower(Plain())


def stuck() -> nn.Module:
    """Two blocks, the second of which never returns on rank 1."""
    return Tower(Plain(), Stuck())


def raising() -> nn.Module:
    """Two blocks, the second of which raises on rank 1."""
    return Tower(Plain(), Raising())


def by_rank() -> nn.Module:
    """Another model on rank 1, which cannot be built there."""
    if os.environ["RANK"] == "1":
        raise RuntimeError("the weights of rank 1 are not here")
    return Tower(Plain())
