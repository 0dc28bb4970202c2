"""A run with instrumentation and one without: what counts as equal, and what is said of a difference."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traces import TraceBuilder

from dtypedoctor.examination.results import Observer
from dtypedoctor.lab.trials.judge import compare_unwatched
from dtypedoctor.runner.run import Run, WorkerExit
from dtypedoctor.trace.events import Header, Metric, Raised, Resources

STEPS = ({"loss": 2.0, "grad_norm": 0.5}, {"loss": 1.5, "grad_norm": 0.25})


def run(*steps: dict[str, float], checksum: str = "aa", outcome: str = "completed", raised: Raised | None = None,
        code: int = 0, **more: Any) -> Run:  # fmt: skip
    builder = TraceBuilder()
    for number, values in enumerate(steps, start=1):
        builder.add(Metric(n=builder.n(), step=number, values=values))
    if raised is not None:
        builder.add(raised)
    builder.add(Resources(seconds=1.0, peak_memory=0, device="cpu", checksum=checksum))
    ended = WorkerExit(code=code, timed_out=False, seconds=1.0)
    return Run(trace=builder.build(outcome=outcome), exit=ended, directory=Path("nowhere"), **more)


def error(message: str) -> Raised:
    """An exception that ended a run."""
    return Raised(n=9, step=1, call=1, phase="forward", type="RuntimeError", message=message, frames=[], modules=[""])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (run(STEPS[0]), "2 steps with instrumentation, 1 without"),
        (run(STEPS[0], {"loss": 1.5, "grad_norm": 0.5}), "grad_norm of step 2 is 0.25 with instrumentation, 0.5 without"),
        (run({"grad_norm": 0.5}, STEPS[1]), "loss of step 1 is 2.0 with instrumentation, None without"),
        (run(*STEPS, checksum="bb"), "the trained parameters differ"),
        (run(*STEPS, code=3), "the script ended with status 0 with instrumentation, and ended with status 3 without"),
    ],
    ids=["steps", "gradient", "loss", "parameters", "exit"],
)  # fmt: skip
def test_the_first_difference_between_the_watched_and_the_bare_run_is_named(other: Run, reason: str) -> None:
    """The first in which they differ, with both values."""
    assert compare_unwatched(run(*STEPS), other) == Observer(bitwise_equal=False, reason=reason)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_rank_that_its_launcher_ended_is_no_difference(swapped: bool) -> None:
    """Every rank fails; which of them torchrun ends by SIGTERM before it has ended by itself is a race."""
    failed, stopped = run(*STEPS, code=1), run(*STEPS)
    stopped = replace(stopped, exit=replace(stopped.exit, ended_by_launcher=signal.SIGTERM))
    watched = replace(failed, ranks=(failed, stopped if swapped else failed))
    unwatched = replace(failed, ranks=(failed, failed if swapped else stopped))
    found = compare_unwatched(watched, unwatched)
    assert found.bitwise_equal is True
    assert found.reason.startswith("on each of 2 ranks, ")


VOLATILE = (
    ("no kernel at 0x7f00", "no kernel at 0x8e11"),
    ("cannot reach 127.0.0.1:43211", "cannot reach 127.0.0.1:38075"),
    ("tcp://node-1:29500/ is gone", "tcp://node-1:29711/ is gone"),
    ("[::1]:43211 and localhost:1 are taken", "[::1]:3 and localhost:27 are taken"),
    ("port 43211 (port=43211) is taken", "port 9 (port=9) is taken"),
    ("rank 0 (pid 77, PID: 8) and process 77", "rank 0 (pid 42, PID: 9) and process 42"),
    ("[1077] {1077}", "[1042] {1042}"),
    ("lost /tmp/job-abc1/log.txt:7", "lost /tmp/job-xyz_2/log.txt:7"),
    ("lost '/dev/shm/torch_77_1'", "lost '/dev/shm/torch_42_8'"),
    ("at 2026-11-23 15:00:00.123456 (15:00:00)", "at 2026-11-24 03:10:59.9 (03:10:59)"),
    ("at 2026-11-23T15:00:00+00:00, 1795445520.511", "at 2026-11-23T15:00:09+00:00, 1795445529.1"),
    ("1 min 30 s, then 3 s. 1795445520511 ms", "2 min 7 s, then 5 s. 1795445529000 ms"),
    ("runs/20261123-150000 is full", "runs/20261123-150207 is full"),
    ("after 12.31 s, 3ms, 1e-05s [00:12<00:03, 4.1it/s]", "after 1 s, 30ms, 2s [01:12<00:05, 1.25it/s]"),
    ("run 123e4567-e89b-12d3-a456-426614174000", "run 123e4567-e89b-12d3-a456-426614174999"),
)
LASTING = (
    (
        "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
        "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x7)",
    ),
    ("got Half", "got Float"),
    ("max 3.0 min -2.0", "max 5.0 min -2.0"),
    ("max 3.0 min: nan, h 1", "max 5.0 min: nan, h 1"),
    ("max 3.0\nmin tensor(1.)", "max 5.0\nmin tensor(1.)"),
    ("step 10 s 1", "step 11 s 1"),
    ("params 1500000000", "params 1600000000"),
    ("sum 1500000000.0", "sum 1600000000.0"),
    ("loss is 12.31", "loss is 12.32"),
    ("step 12 of 77", "step 13 of 77"),
    ("/tmp/a/train.py:7: no", "/tmp/a/train.py:8: no"),
    ("index 1077 is out of bounds", "index 1078 is out of bounds"),
    ("2 steps", "3 steps"),
    ("size [4, 16]", "size [4, 17]"),
    ("0.5 max, 3 heads", "0.5 max, 4 heads"),
)


def as_process(pid: int, one: Run) -> Run:
    records = tuple(replace(r, pid=pid) if isinstance(r, Header) else r for r in one.trace.records)
    return replace(one, trace=replace(one.trace, records=records))


@pytest.mark.parametrize(
    ("message", "other", "is_same"), [*((*p, True) for p in VOLATILE), *((*p, False) for p in LASTING)]
)
def test_what_no_two_processes_share_is_no_difference(message: str, other: str, *, is_same: bool) -> None:
    """A number that may come from the computation is one."""
    one, two = (
        as_process(pid, run(*STEPS, outcome="raised", raised=error(said), code=1))
        for pid, said in ((1077, message), (1042, other))
    )
    assert compare_unwatched(one, two).bitwise_equal is is_same


def test_an_exception_before_any_step_leaves_nothing_to_compare() -> None:
    """It is the same error; a run that completes without a step has not even that."""
    raised = run(outcome="raised", raised=error("no"), code=1)
    found = compare_unwatched(raised, raised)
    assert (found.bitwise_equal, found.same_error) == (None, True)
    assert found.reason.startswith("the run raises the same error")
    empty = compare_unwatched(run(), run())
    assert empty == Observer(bitwise_equal=None, reason="no step was completed, so there is nothing to compare")


def test_a_run_that_raises_with_instrumentation_only_is_a_difference() -> None:
    """What was raised is quoted."""
    found = compare_unwatched(run(outcome="raised", raised=error("no\nsecond line"), code=1), run(*STEPS))
    said = "the run raises RuntimeError (no) with instrumentation, and completes without"
    assert found == Observer(bitwise_equal=False, reason=said)


def test_a_worker_that_died_and_a_trace_without_an_end_leave_it_open() -> None:
    """Neither equal nor different."""
    died = run(*STEPS, code=-9)
    died = replace(died, trace=replace(died.trace, records=died.trace.records[:-1]))
    for found in (compare_unwatched(died, run(*STEPS)), compare_unwatched(run(*STEPS), died)):
        assert found == Observer(bitwise_equal=None, reason="a worker died, so there is nothing to compare")


def test_of_several_ranks_the_worst_counts() -> None:
    """One that differs outweighs one that could not be compared, and that one those that are equal."""
    same, none, other = run(*STEPS), run(), run(STEPS[0])

    def job(*ranks: Run) -> Run:
        return replace(ranks[0], ranks=ranks)

    equal = compare_unwatched(job(same, same), job(same, same))
    assert (equal.bitwise_equal, equal.reason[:22]) == (True, "on each of 2 ranks, lo")
    differs = compare_unwatched(job(none, same, same), job(none, same, other))
    assert (differs.bitwise_equal, differs.reason) == (False, "on rank 2, 2 steps with instrumentation, 1 without")
    unknown = compare_unwatched(job(same, none), job(same, none))
    assert (unknown.bitwise_equal, unknown.reason[:10]) == (None, "on rank 1,")
