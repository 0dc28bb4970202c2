"""Runs of a treatment that are begun before they are asked for: beside the one that is waited for, and gone where nobody asks."""

import os
import shutil
from pathlib import Path

import pytest

from dtypedoctor.cli.running import MOST_AT_ONCE, _at_once
from dtypedoctor.errors import UsageError
from dtypedoctor.runner import ahead as ahead_module
from dtypedoctor.runner.ahead import Ahead, OneByOne
from dtypedoctor.runner.launch import StartedWorker, run_to_end
from dtypedoctor.runner.run import STDOUT, Run, write_request
from dtypedoctor.scenario.loading import case_of
from dtypedoctor.scenario.model import Request, Scenario

DTYPES = ("float16", "bfloat16", "float32")
LABELED = [(dtype, Request(scenario=case_of("builtin:llama-tiny", dtype, "forward"))) for dtype in DTYPES]
FIRST = Request(scenario=case_of("builtin:llama-tiny", "float16"))


class Workers:
    """Workers that end when they have been looked at some times, and what became of them."""

    def __init__(self, directory: Path, looks: int = 3) -> None:
        self.directory = directory
        self.looks = looks
        self.code = 0
        self.begun: list[str] = []
        self.running: set[str] = set()
        self.killed: list[str] = []
        self.most = 0

    def start(self, request: Request, place: Path) -> StartedWorker:
        """Starts one in ``place``."""
        if place.name == "float32" and self.looks < 0:
            raise UsageError("the disk is full")
        place.mkdir()
        write_request(place, request)
        (place / STDOUT).write_text("what the run has left")
        self.begun.append(place.name)
        self.running.add(place.name)
        self.most = max(self.most, len(self.running))
        left = [self.looks]

        def status(seconds: float) -> int | None:
            left[0] -= 1
            if left[0] > 0 and place.name in self.running:
                return None
            self.running.discard(place.name)
            return self.code

        def kill() -> None:
            self.killed.append(place.name)
            self.running.discard(place.name)

        return StartedWorker(place, 60.0, status, kill)

    def ahead(self, most: int) -> Ahead:
        """What begins them."""
        return Ahead(self.start, self.directory, most, lambda place: None)


def test_what_is_expected_runs_beside_what_is_waited_for(tmp_path: Path) -> None:
    """One worker is left to whoever asks; each run is made once, and no more at a time than there are workers."""
    workers = Workers(tmp_path)
    with workers.ahead(2) as ahead:
        ahead.expect(LABELED)
        assert workers.begun == ["float16"]
        assert ahead.run(FIRST, "before").directory == tmp_path / "before"
        for label, request in LABELED:
            assert ahead.run(request, label).directory == tmp_path / label
    assert sorted(workers.begun) == ["before", "bfloat16", "float16", "float32"]
    assert workers.most == 2
    assert workers.killed == []


def test_what_nobody_asks_for_is_stopped_and_removed(tmp_path: Path) -> None:
    """Also where what is asked for under that label is something else."""
    workers = Workers(tmp_path, looks=1000)
    with workers.ahead(4) as ahead:
        ahead.expect(LABELED)
        assert workers.begun == list(DTYPES)
        workers.looks = 1
        assert ahead.run(FIRST, "float16").directory == tmp_path / "float16"
    assert workers.killed == list(DTYPES)
    assert [place.name for place in tmp_path.iterdir()] == ["float16"]


def test_with_one_worker_nothing_is_begun(tmp_path: Path) -> None:
    """A GPU, say, has room for one."""
    workers = Workers(tmp_path)
    with workers.ahead(1) as ahead:
        ahead.expect(LABELED)
        ahead.run(LABELED[2][1], "float32")
    assert workers.begun == ["float32"]


def test_what_cannot_be_begun_is_told_to_whoever_asks(tmp_path: Path) -> None:
    """Not before."""
    workers = Workers(tmp_path, looks=-1)
    with workers.ahead(4) as ahead:
        ahead.expect(LABELED)
        with pytest.raises(UsageError, match="the disk is full"):
            ahead.run(LABELED[2][1], "float32")


def test_on_a_disk_that_is_nearly_full_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left belongs to the run that is waited for."""
    monkeypatch.setattr(ahead_module, "ROOM", 1 << 60)
    workers = Workers(tmp_path)
    with workers.ahead(4) as ahead:
        ahead.expect(LABELED)
        ahead.run(LABELED[2][1], "float32")
    assert workers.begun == ["float32"]


@pytest.mark.parametrize("most", [1, 4])
def test_the_same_request_is_run_once(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another label lies the same run, whole, and it is not begun ahead either; of a worker that died nothing is taken for another one's."""
    monkeypatch.setattr(Run, "died", property(lambda run: run.exit.code != 0))
    workers = Workers(tmp_path)
    with workers.ahead(most) as ahead:
        first = ahead.run(FIRST, "reference")
        ahead.expect([("fix", FIRST)])
        again = ahead.run(FIRST, "fix")
        assert workers.begun == ["reference"]
        assert (again.directory, again.trace, again.exit) == (tmp_path / "fix", first.trace, first.exit)
        assert (tmp_path / "fix" / STDOUT).read_text() == "what the run has left"
        workers.code = 1
        ahead.run(LABELED[0][1], "dies")
        ahead.run(LABELED[0][1], "dies again")
    assert workers.begun == ["reference", "dies", "dies again"]


def test_a_script_is_run_as_often_as_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may draw its random numbers from anywhere."""
    monkeypatch.setattr(Run, "died", property(lambda run: False))
    script = {"name": "any", "summary": "any", "steps": [{"workload": {"kind": "script", "path": "train.py"}}]}
    request = Request(scenario=Scenario.model_validate(script))
    workers = Workers(tmp_path)
    runs = OneByOne(lambda request, place: run_to_end(workers.start(request, place)), tmp_path)
    for label in ("before", "rerun"):
        assert runs.run(request, label).directory == tmp_path / label
    assert workers.begun == ["before", "rerun"]


def test_without_room_for_a_copy_the_run_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half-copied is left."""

    def full(source: Path, target: Path, **_: object) -> None:
        target.mkdir()
        write_request(target, FIRST)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Run, "died", property(lambda run: False))
    monkeypatch.setattr(shutil, "copytree", full)
    workers = Workers(tmp_path)
    with workers.ahead(1) as ahead:
        ahead.run(FIRST, "reference")
        assert ahead.run(FIRST, "fix").directory == tmp_path / "fix"
    assert workers.begun == ["reference", "fix"]


@pytest.mark.parametrize(("processors", "most"), [(1, 1), (2, 3), (64, MOST_AT_ONCE)])
def test_a_single_processor_is_left_to_what_is_waited_for(
    processors: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are kept busy to the end; a model that is not tiny has all of them for itself."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert _at_once(FIRST.scenario.with_changes(device="cpu")) == most
    assert _at_once(case_of("some/model", "float16").with_changes(device="cpu")) == 1
