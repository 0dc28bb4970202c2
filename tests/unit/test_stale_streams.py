"""Launches on another CUDA stream than the current one."""

from compilation_examples import launches

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.rules.compiling import detect_stale_streams


def test_stale_launches_are_counted_with_both_handles() -> None:
    """The default stream is 0."""
    (finding,) = detect_stale_streams(launches((0, 0, 21), (0, 0x7F10, 42)).build())
    assert (finding.id, finding.step, finding.phase) == ("stale-cuda-stream", 2, "forward")
    assert finding.summary.startswith("42 of 63 kernel launches went to another CUDA stream")
    assert finding.evidence == ("42 launches on cuda:0: stream 0x0, current 0x7f10.",)
    assert finding.remedies == ("nf4-stream-per-call",)


def test_stale_launches_come_before_the_nan_that_a_race_may_have_made() -> None:
    """What is read before it is written may be anything; the stream is the root cause."""
    trace = launches((0, 0x7F10, 42))
    trace.sample("norm", float("nan"), nan=1)
    first, second = diagnose(trace.build())
    assert (first.id, second.fqn) == ("stale-cuda-stream", "norm")
