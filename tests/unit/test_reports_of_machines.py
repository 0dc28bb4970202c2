"""Jobs of several machines: what a launcher's options say of them, the folder that they share, and what belongs together."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtypedoctor.cli import scripts
from dtypedoctor.cli.scripts import SECONDS, Nodes, enter, leave, nodes_of, wait_for_others
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.processes import TOGETHER, open_job
from dtypedoctor.trace.events import End, Header
from dtypedoctor.trace.ranks import rank_directory
from dtypedoctor.trace.writer import TraceWriter

JOB = {"nodes": 2, "meeting": ":29500", "program": ["train.py"]}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--nproc-per-node 2", None),
        ("--nnodes 1", None),
        ("--nnodes=1:1", None),
        ("--nnodes many", None),
        ("--nnodes 2 --node_rank=1 --master-port 29500", Nodes(most=2, number=1, meeting=":29500")),
        ("--nnodes=1:4 --rdzv-id job --rdzv-endpoint head:29400", Nodes(most=4, number=None, meeting="job:29400")),
        ("--num_machines 3 --machine_rank 0 --main_process_port 1", Nodes(most=3, number=0, meeting=":1")),
    ],
)
def test_what_a_launchers_options_say_of_machines(options: str, found: Nodes | None) -> None:
    """The host of the rendezvous is left out: each machine may call it by another name."""
    assert nodes_of(("/bin/torchrun", *options.split()), {}) == found


def test_torchruns_variables_stand_for_its_options() -> None:
    """An option goes before its variable; a script without a launcher has no machines."""
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "1"}
    assert nodes_of(("torch.distributed.run",), variables) == Nodes(most=2, number=1, meeting=":")
    assert nodes_of(("torch.distributed.run", "--nnodes", "1"), variables) is None
    assert nodes_of(("train.py", "--nnodes", "2"), variables) is None


def test_machines_that_come_at_once_get_a_directory_each(tmp_path: Path) -> None:
    """Whoever is first makes the folder; nobody gets what another one has, and none takes a half-written file for another job's."""
    job = JOB | {"nodes": 8}
    with ThreadPoolExecutor(8) as threads:
        for out in (tmp_path / str(number) for number in range(40)):
            places = list(threads.map(lambda _, out=out: enter(out, job, None), range(8)))
            assert sorted(place.name for place in places) == [f"node-{number}" for number in range(8)]
            assert {path.name for path in out.iterdir()} == {"nodes.json", *(place.name for place in places)}


def test_a_folder_that_is_not_of_this_job_is_left_as_it_is(tmp_path: Path) -> None:
    """Another job's, one that has ended, one that is full, one that holds anything else: each is refused in a sentence."""
    out = tmp_path / "out"
    enter(out, JOB, 0)
    for job, number, why in ((JOB | {"meeting": ":1"}, 1, "is not of this job"), (JOB, 0, "node-0: already exists")):
        with pytest.raises(UsageError, match=why):
            enter(out, job, number)
    enter(out, JOB, None)
    with pytest.raises(UsageError, match="all 2 machines of this job record here already"):
        enter(out, JOB, None)
    (out / "node-0" / "report.json").touch()
    with pytest.raises(UsageError, match="this job has ended already"):
        enter(out, JOB, 2)
    (tmp_path / "own.txt").touch()
    with pytest.raises(UsageError, match="already exists, and is not of this job"):
        enter(tmp_path, JOB, 0)
    assert not (tmp_path / "nodes.json").exists()


def test_the_last_one_to_leave_takes_the_folder_with_it(tmp_path: Path) -> None:
    """As long as another machine records there, it stays."""
    place = enter(tmp_path / "out", JOB, 0)
    leave(tmp_path / "out")
    assert (tmp_path / "out" / "nodes.json").exists()
    (place / "node.json").unlink()
    place.rmdir()
    leave(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_machines_that_may_still_report_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of here that is gone is not; one of elsewhere is, until it has reported or time is over."""
    clock = [0.0]
    monkeypatch.setattr(scripts.time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    own, other = enter(tmp_path / "out", JOB, 0), enter(tmp_path / "out", JOB, 1)
    (own / "report.json").touch()
    told = json.loads((other / "node.json").read_text())
    (other / "node.json").write_text(json.dumps(told | {"pid": 2**22 + 1}))  # no process has such a number
    wait_for_others(tmp_path / "out", sleep)
    assert clock == [0.0]
    (other / "node.json").write_text(json.dumps(told | {"boot": "another"}))
    wait_for_others(tmp_path / "out", sleep)
    assert clock[0] >= SECONDS
    clock[0] = 0.0
    (other / "report.json").touch()
    wait_for_others(tmp_path / "out", sleep)
    assert clock == [0.0]


def recorded(place: Path, rank: int, size: int, created: float = 0.0) -> None:
    rank_directory(place / "before", rank).mkdir(parents=True)
    writer = TraceWriter(rank_directory(place / "before", rank))
    writer.write(Header(created=created, pid=1, rank=rank, world_size=size))
    writer.write(End(n=1, outcome="completed", steps_completed=3))
    writer.close()


@pytest.mark.parametrize(
    ("rank", "size", "created", "why"),
    [
        (1, 3, 0.0, "rank 0 is one of 2, rank 1 one of 3"),
        (1, 2, 2 * TOGETHER, "ranks 0 and 1 began 1.0 hours apart"),
        (0, 2, 0.0, "rank 0 was recorded twice"),
    ],
)
def test_ranks_of_two_jobs_are_not_joined(rank: int, size: int, created: float, why: str, tmp_path: Path) -> None:
    """A report on both would tell of a job that there never was."""
    recorded(tmp_path / "a", 0, 2)
    recorded(tmp_path / "b", rank, size, created)
    with pytest.raises(UsageError, match=why):
        open_job(tmp_path / "a", tmp_path / "b")


def test_ranks_of_one_job_are_joined_wherever_they_lie(tmp_path: Path) -> None:
    """In the folder of a machine, or in a folder of several."""
    recorded(tmp_path / "a", 1, 3)
    recorded(tmp_path / "b" / "node-0", 2, 3)
    recorded(tmp_path / "b" / "node-1", 0, 3)
    assert [one.rank for one in open_job(tmp_path / "a", tmp_path / "b").run.ranks] == [0, 1, 2]
    (tmp_path / "c").mkdir()
    with pytest.raises(UsageError, match="c: no trace of a job here"):
        open_job(tmp_path / "a", tmp_path / "c")
