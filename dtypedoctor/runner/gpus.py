"""Which GPUs there are, without torch."""

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["gpu_environment", "visible_gpus"]

_DRIVER = Path("/proc/driver/nvidia/gpus")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` names, else the numbers of all GPUs that the driver knows."""
    named = environment.get(VARIABLE)
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    try:
        return tuple(str(number) for number, _ in enumerate(driver.iterdir()))
    except OSError:
        return ()


def gpu_environment(slot: int, gpus: tuple[str, ...]) -> dict[str, str]:
    """The variables by which a worker gets one GPU for itself; none where there is nothing to share out."""
    return {VARIABLE: gpus[slot % len(gpus)]} if len(gpus) > 1 else {}
