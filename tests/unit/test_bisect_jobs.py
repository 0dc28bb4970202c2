"""Probes of several processes: a finished one is read from disk with all ranks, an interrupted one is made again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dtypedoctor.errors import UsageError
from dtypedoctor.runner import process
from dtypedoctor.runner.process import StartedRanks, request_of_rank
from dtypedoctor.runner.run import Run, WorkerExit, collect, led_by, write_request
from dtypedoctor.scenario.loading import case_of
from dtypedoctor.scenario.model import Request
from dtypedoctor.trace.events import End, Header, Raised
from dtypedoctor.trace.ranks import rank_directory
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.trials.bisection.probe_runner import ProbeRunner

DISTRIBUTED = {"processes": 2, "strategy": "ddp"}
REQUEST = Request(scenario=case_of("builtin:llama-tiny", "float16", "forward").with_changes(distributed=DISTRIBUTED))
ENDED = WorkerExit(code=0, timed_out=False, seconds=1.0)
RAISED = Raised(
    n=1, step=1, phase="forward", call=1, modules=["mlp"], frames=[], op=None, type="ValueError", message="no"
)


def ranks_left_in(place: Path, *exits: WorkerExit) -> Run:
    """A job whose second rank raises, with these exits written down."""
    runs = []
    for rank, ended in enumerate(exits):
        own = rank_directory(place, rank)
        own.mkdir(parents=True)
        write_request(own, request_of_rank(REQUEST, rank))
        writer = TraceWriter(own)
        writer.write(Header(rank=rank, world_size=2))
        if rank:
            writer.write(RAISED)
        writer.write(End(n=2, outcome="raised" if rank else "completed", steps_completed=1))
        writer.close()
        runs.append(replace(collect(own, ended), rank=rank))
    return led_by(tuple(runs), 0)


class Started:
    """Stands for a job that has ended."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def wait(self, seconds: float) -> bool:
        """It has."""
        return True

    def stop(self) -> None:
        """Nothing is left."""

    def collect(self) -> Run:
        """Both ranks."""
        return ranks_left_in(self._place, ENDED, replace(ENDED, code=1))


@pytest.fixture
def runner(tmp_path: Path) -> ProbeRunner:
    """Runs jobs of which the second rank raises."""
    return ProbeRunner(tmp_path, lambda request, place, slot: Started(place), width=1)


def test_a_finished_job_is_read_from_disk_and_led_by_the_rank_in_which_it_began(runner: ProbeRunner) -> None:
    """As when it was run."""
    first = next(runner.run_all([REQUEST]))
    again = next(runner.run_all([REQUEST]))
    assert (first.repeated, again.repeated) == (False, True)
    for done in (first, again):
        assert isinstance(done.run, Run)
        assert (done.run.rank, [one.rank for one in done.run.ranks]) == (1, [0, 1])
        assert [one.exit.code for one in done.run.ranks] == [0, 1]


@pytest.mark.parametrize(
    "left",
    [
        lambda place: ranks_left_in(place, ENDED),
        lambda place: ranks_left_in(place, ENDED, replace(ENDED, asked_to_end=15)),
        lambda place: ranks_left_in(place, ENDED, ENDED) and (place / "rank-1" / "exit.json").unlink(),
    ],
    ids=["a rank is missing", "a signal ended it", "killed before the last rank was collected"],
)
def test_an_interrupted_job_is_made_again(runner: ProbeRunner, left: Callable[[Path], object]) -> None:
    """What it left says nothing about the probe."""
    place = next(runner.run_all([REQUEST])).run
    assert isinstance(place, Run)
    directory = place.directory.parent
    for rank in (0, 1):
        rank_directory(directory, rank).rename(directory.parent / f"old-{rank}")
    left(directory)
    assert next(runner.run_all([REQUEST])).repeated is False


def started(monkeypatch: pytest.MonkeyPatch, ended: Run | UsageError) -> StartedRanks:
    """A job that ends so."""

    def run_ranks(*_: object, **__: object) -> Run:
        if isinstance(ended, UsageError):
            raise ended
        return ended

    monkeypatch.setattr(process, "run_ranks", run_ranks)
    job = StartedRanks(REQUEST, Path("x"))
    assert job.wait(0.0)
    return job


def test_a_signal_that_went_to_a_job_ends_the_bisection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is known by then is reported, as where a signal comes between two runs."""
    run = ranks_left_in(tmp_path, *[replace(ENDED, code=-15, asked_to_end=15)] * 2)
    with pytest.raises(KeyboardInterrupt, match="interrupted by SIGTERM"):
        started(monkeypatch, run).collect()


def test_a_job_that_cannot_be_run_says_so_when_it_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it goes on."""
    with pytest.raises(UsageError, match="no room"):
        started(monkeypatch, UsageError("no room", "Make some.")).collect()
