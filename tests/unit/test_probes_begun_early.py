"""Probes that are begun before anybody asks for them: beside the others, never in their way, and ended if nobody does."""

from pathlib import Path

import pytest

from dtypedoctor.runner.run import Run, WorkerExit, collect, write_request
from dtypedoctor.scenario.loading import case_of
from dtypedoctor.scenario.model import Request
from dtypedoctor.trace.events import End, Header, Raised
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.trials.bisection.probe_runner import NONE_APART, Apart, ProbeRunner

DTYPES = ("float16", "bfloat16", "float32")
REQUESTS = [Request(scenario=case_of("builtin:llama-tiny", dtype, "forward")) for dtype in DTYPES]

OUT_OF_MEMORY = Raised(
    n=1, step=1, call=1, phase="forward", type="OutOfMemoryError", message="CUDA out of memory.", frames=[], modules=[]
)


class Worker:
    """A worker that ends when it has been waited for a few times."""

    def __init__(self, pool: "Pool", request: Request, place: Path, slot: int) -> None:
        self.pool, self.request, self.place, self.slot = pool, request, place, slot
        self.left = 12
        self.stopped = False
        self.lacks_memory = request == pool.greedy and pool.runner.beside > 0

    def wait(self, seconds: float) -> bool:
        """It has, at the twelfth time."""
        self.left -= 1
        if self.left <= 0 and self in self.pool.running:
            self.pool.running.remove(self)
        return self.left <= 0

    def stop(self) -> None:
        """Ends it."""
        self.stopped = True
        if self in self.pool.running:
            self.pool.running.remove(self)

    def collect(self) -> Run:
        """A run without records."""
        self.place.mkdir(parents=True)
        write_request(self.place, self.request)
        writer = TraceWriter(self.place)
        writer.write(Header())
        if self.lacks_memory:
            writer.write(OUT_OF_MEMORY)
        outcome = "raised" if self.lacks_memory else "completed"
        writer.write(End(n=2, outcome=outcome, steps_completed=0 if self.lacks_memory else 1))
        writer.close()
        return collect(self.place, WorkerExit(code=0, timed_out=False, seconds=1.0))


class Pool:
    """Starts workers, and sees that no two have one slot."""

    def __init__(self, tmp_path: Path, width: int, apart: Apart = NONE_APART) -> None:
        self.running: list[Worker] = []
        self.all: list[Worker] = []
        self.width = width
        self.greedy: Request | None = None
        self.runner = ProbeRunner(tmp_path, self.start, width, apart=apart)

    def start(self, request: Request, place: Path, slot: int) -> Worker:
        """Starts a worker."""
        assert slot not in {one.slot for one in self.running}
        worker = Worker(self, request, place, slot)
        self.running.append(worker)
        self.all.append(worker)
        assert len(self.running) <= self.width + self.runner.beside
        return worker

    @property
    def dtypes(self) -> list[str]:
        """What runs, in the order in which it was begun."""
        return [str(one.request.scenario.steps[0].model.dtype) for one in self.running]


def test_one_worker_is_left_to_what_is_asked_for(tmp_path: Path) -> None:
    """Of three, two begin early."""
    pool = Pool(tmp_path, 3)
    pool.runner.begin(REQUESTS)
    assert pool.dtypes == ["float16", "bfloat16"]


def test_what_is_begun_twice_runs_once(tmp_path: Path) -> None:
    """Code is generated for the workload that is likely to be asked about, and again with everything that the table needs."""
    pool = Pool(tmp_path, 4)
    pool.runner.begin(REQUESTS[:1])
    pool.runner.begin(REQUESTS)
    pool.runner.begin(REQUESTS)
    assert pool.dtypes == ["float16", "bfloat16", "float32"]
    assert len(list(pool.runner.run_all(REQUESTS))) == 3
    assert len(pool.all) == 3


def test_while_nobody_asks_all_workers_are_taken(tmp_path: Path) -> None:
    """Who asks then waits for one of them, and no more run than there are workers."""
    pool = Pool(tmp_path, 2)
    pool.runner.begin(REQUESTS[:2])
    assert pool.dtypes == ["float16"]
    with pool.runner.idle():
        assert pool.dtypes == ["float16", "bfloat16"]
    assert pool.runner.run(REQUESTS[2], "remedy").exit.code == 0
    assert len(list(pool.runner.run_all(REQUESTS))) == 3
    assert len(pool.all) == 4
    assert pool.running == []


def test_a_single_worker_is_taken_while_nobody_asks(tmp_path: Path) -> None:
    """Each run has to wait for the one before."""
    pool = Pool(tmp_path, 1)
    pool.runner.begin(REQUESTS)
    with pool.runner.idle():
        assert pool.dtypes == ["float16"]
    assert len(list(pool.runner.run_all(REQUESTS))) == 3
    assert len(pool.all) == 3


def test_a_worker_that_has_ended_is_taken_again_while_nobody_asks(tmp_path: Path) -> None:
    """Whoever waits for something else lets them go on."""
    pool = Pool(tmp_path, 1)
    pool.runner.begin(REQUESTS)
    with pool.runner.idle() as go_on:
        for _ in range(40):
            go_on()
    assert len(pool.all) == 3


GIB = 1 << 30


@pytest.mark.parametrize(
    ("room", "peak", "processes"),
    [(72 * GIB, 7 * GIB, 2), (60 * GIB, 17 * GIB, 0), (100 * GIB, 17 * GIB, 1), (0, GIB, 0), (GIB, 0, 0)],
)
def test_processes_of_their_own_must_fit_beside_the_server(room: int, peak: int, processes: int) -> None:
    """Each may take three times what a plain run takes, and the server's reference in float32 twice as much."""
    assert Apart(needs=lambda request: True, room=room).processes(peak) == processes


def test_what_cannot_be_served_in_place_runs_beside_what_can(tmp_path: Path) -> None:
    """In slots of its own, which keep nothing else waiting; without room it waits as all else does."""
    apart = Apart(needs=lambda request: request != REQUESTS[0], room=8)
    pool = Pool(tmp_path, 1, apart)
    pool.runner.begin(REQUESTS)
    assert pool.running == []
    pool.runner.make_room(1)
    assert pool.runner.beside == 2
    pool.runner.begin([])
    assert pool.dtypes == ["bfloat16", "float32"]
    assert pool.runner.run(REQUESTS[0]).exit.code == 0
    assert [one.slot for one in pool.all] == [1, 2, 0]
    assert len(list(pool.runner.run_all(REQUESTS))) == 3
    assert len(pool.all) == 3


def test_what_lacks_memory_beside_others_is_run_again_without_them(tmp_path: Path) -> None:
    """These are ended, and run when they are asked for, one after the other: a mode that fits is not said to fail."""
    pool = Pool(tmp_path, 1, Apart(needs=lambda request: request != REQUESTS[0], room=8))
    pool.greedy = REQUESTS[0]
    pool.runner.make_room(1)
    pool.runner.begin(REQUESTS[1:])
    assert pool.dtypes == ["bfloat16", "float32"]
    assert pool.runner.run(REQUESTS[0]).trace.last(Raised) is None
    assert pool.runner.beside == 0
    assert [one.stopped for one in pool.all] == [True, True, False, False]
    assert len(list(pool.runner.run_all(REQUESTS))) == 3
    assert [one.slot for one in pool.all] == [1, 2, 0, 0, 0, 0]


def test_with_a_single_worker_nothing_begins_early(tmp_path: Path) -> None:
    """But all of it is done when it is asked for."""
    pool = Pool(tmp_path, 1)
    pool.runner.begin(REQUESTS)
    assert pool.running == []
    assert len(list(pool.runner.run_all(REQUESTS))) == 3


def test_who_asks_for_what_has_begun_gets_it(tmp_path: Path) -> None:
    """It is not run twice, and what is asked for beside it runs in the slot that is left."""
    pool = Pool(tmp_path, 2)
    pool.runner.begin(REQUESTS[:2])
    assert pool.dtypes == ["float16"]
    assert pool.runner.run(REQUESTS[2], "remedy").exit.code == 0
    done = list(pool.runner.run_all(REQUESTS))
    assert sorted(one.index for one in done) == [0, 1, 2]
    assert [str(one.request.scenario.steps[0].model.dtype) for one in pool.all].count("float16") == 1
    assert pool.running == []


def test_what_nobody_asks_for_is_ended(tmp_path: Path) -> None:
    """And not begun any more."""
    pool = Pool(tmp_path, 2)
    pool.runner.begin(REQUESTS)
    pool.runner.leave_begun()
    assert [one.stopped for one in pool.all] == [True]
    pool.runner.run(REQUESTS[0])
    assert len(pool.all) == 2
    assert pool.running == []


def test_an_interruption_ends_what_runs_and_leaves_what_has_begun_to_the_end(tmp_path: Path) -> None:
    """The bisection ends it, however it ends itself."""
    pool = Pool(tmp_path, 2)
    pool.runner.begin(REQUESTS[:1])
    asking = pool.runner.run_all([REQUESTS[1]])
    with pytest.raises(KeyboardInterrupt):
        asking.throw(KeyboardInterrupt)
    pool.runner.leave_begun()
    assert pool.running == []
