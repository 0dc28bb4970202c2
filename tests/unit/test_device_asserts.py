"""What CUDA's asynchronous errors say, and what they do not."""

import pytest
from traces import TraceBuilder

from dtypedoctor.diagnosis.incidents import incidents
from dtypedoctor.trace.events import Raised

ASSERT = (
    "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
ADDRESS = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"


def raised(message: str, phase: str) -> Raised:
    """An exception as PyTorch raises it at some later call."""
    return Raised(n=99, step=1, call=1, phase=phase, type="AcceleratorError", message=message, frames=[], modules=[])


@pytest.mark.parametrize(
    ("message", "phase"), [(ASSERT, "forward"), (ASSERT, "backward"), (ADDRESS, "forward"), (ADDRESS, "generate")]
)
def test_an_error_of_the_device_among_finite_values_is_no_refused_value(message: str, phase: str) -> None:
    """An index out of range asserts too, and a wild pointer has nothing to do with precision."""
    trace = TraceBuilder().sample("head", 2.0).add(raised(message, phase)).build(outcome="raised")
    assert incidents(trace) == ()


def test_a_sampler_that_asserts_has_refused_a_value() -> None:
    """On CUDA that is all it says."""
    trace = TraceBuilder().sample("head", 2.0).add(raised(ASSERT, "generate")).build(outcome="raised")
    (incident,) = incidents(trace)
    assert incident.kind == "raised"
