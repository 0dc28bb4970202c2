"""Counts what a step makes the host and the device do."""

import warnings
from collections.abc import Callable
from typing import Any

import torch


def count_synchronisations(work: Callable[[], Any]) -> int:
    """How often the host waits for the CUDA device inside ``work``, as torch's own debug mode sees it."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught)


def count_kernels(work: Callable[[], Any], name: str) -> int:
    """How many kernels whose name contains ``name`` run on the CUDA device inside ``work``."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if name in event.key)
