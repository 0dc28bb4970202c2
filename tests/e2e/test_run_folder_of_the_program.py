"""`exec` and a program that makes, empties or deletes the folder in which runs are kept: neither notices the other."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from command import forked, report_of
from patience import becomes

pytestmark = pytest.mark.slow

OVERFLOW = """
import os, shutil, torch
{begin}
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).half()
with torch.no_grad():
    net[0].weight.fill_(1.0)
    net[1].weight.fill_(6e4)
net(torch.ones(2, 4).half())
"""

FOLDERS = {
    "makes it": "os.mkdir('runs'); open('runs/log', 'w').close()",
    "deletes it and makes it": "shutil.rmtree('runs', ignore_errors=True); os.makedirs('runs/first'); open('runs/log', 'w').close()",
    "deletes it": "shutil.rmtree('runs', ignore_errors=True)",
    "lists it": "assert not os.path.exists('runs'); assert 'runs' not in os.listdir('.')",
}
"""What a program does about ``runs``, which is where a run lies that has no ``--out``."""


def written(folder: Path, begin: str) -> Path:
    """The overflowing program, which first does something else."""
    path = folder / "work.py"
    path.write_text(OVERFLOW.format(begin=begin))
    return path


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("begin", FOLDERS.values(), ids=FOLDERS)
def test_a_program_does_with_runs_what_it_would_alone(begin: str, tmp_path: Path) -> None:
    """It ends with status 0, its overflow is found and replayed, and the run lies beside what it left in ``runs``."""
    done = forked("exec", "--propagate-exit", written(tmp_path, begin), cwd=tmp_path)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "runs").glob("work-*")
    (finding,) = report_of(run)["findings"]
    assert (finding["id"], finding["op"], finding["confidence"]) == ("float16-overflow", "aten.addmm.default", "proven")
    assert f"runs/{run.name}" in done.err
    assert (tmp_path / "runs" / "log").exists() is ("log" in begin)
    assert not list(tmp_path.glob(".dtypedoctor-*"))


@pytest.mark.release
def test_another_run_of_a_program_that_makes_runs_finds_none_of_its_first(tmp_path: Path) -> None:
    """What the first run made in ``runs`` is not there in the second, and its own records are not lost."""
    begin = "os.makedirs('runs', exist_ok=True); assert not os.path.exists('runs/log'); open('runs/log', 'w').close()"
    forked("exec", "--verify-uninstrumented", written(tmp_path, begin), cwd=tmp_path)
    (run,) = (tmp_path / "runs").glob("work-*")
    assert [json.loads((run / label / "exit.json").read_text())["code"] for label in ("before", "unwatched")] == [0, 0]


def test_a_run_directory_that_the_program_deletes_is_said_to_be_deleted(tmp_path: Path) -> None:
    """Nothing is known of the run then, and nothing else is said of it: no finding, no health, no end."""
    program = written(tmp_path, "shutil.rmtree('runs')")
    done = forked("exec", "--out", tmp_path / "runs" / "mine", program, cwd=tmp_path)
    assert done.code == 3
    assert "NOTHING MEASURED: The program deleted the folder with the records of this run" in " ".join(done.err.split())
    assert not [word for word in ("Nothing found", "finite", "os._exit", "cannot write") if word in done.err]
    assert report_of(tmp_path / "runs" / "mine")["status"] == "unknown"


WAITING = """
    import time, torch
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    open("entered", "w").close()
    time.sleep(600)
"""


def test_what_was_recorded_until_dtypedoctor_was_killed_lies_where_it_would_have(tmp_path: Path) -> None:
    """SIGKILL leaves the run in ``runs``, and it can be read."""
    (tmp_path / "work.py").write_text(textwrap.dedent(WAITING))
    process = subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", "exec", "work.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
    )
    assert becomes(lambda: (tmp_path / "entered").exists())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert becomes(lambda: len(list(tmp_path.glob("runs/work-*/before/events.jsonl"))) == 1)
    assert not list(tmp_path.glob(".dtypedoctor-*"))
