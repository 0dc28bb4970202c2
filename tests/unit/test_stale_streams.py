"""Launches on another CUDA stream than the current one."""

from compilation_examples import launches

from dtypedoctor.diagnosis import diagnose


def test_stale_launches_come_before_the_nan_that_a_race_may_have_made() -> None:
    """What is read before it is written may be anything; the stream is the root cause."""
    trace = launches((0, 0x7F10, 42))
    trace.sample("norm", float("nan"), nan=1)
    first, second = diagnose(trace.build())
    assert (first.id, second.fqn) == ("stale-cuda-stream", "norm")
