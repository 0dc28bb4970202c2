"""Trainings on a GPU that are ended by the device, for want of its memory, or with kernels in flight."""

from pathlib import Path

import pytest
from faults import Plan, end, mistakes_on_a_gpu, plans_on_a_gpu

TIMES = 6


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", plans_on_a_gpu(TIMES), ids=lambda plan: f"{plan.seed}-{plan.kind}")
def test_a_training_on_a_gpu_that_is_ended_loses_at_most_what_was_in_flight(plan: Plan, tmp_path: Path) -> None:
    """Device-side assert, illegal address, no memory, SIGKILL: what the device had done is in the trace, the rest is said to be missing."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("there is no CUDA device")
    assert list(mistakes_on_a_gpu(end(plan, tmp_path))) == []
