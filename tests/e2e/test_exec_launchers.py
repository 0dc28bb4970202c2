"""``exec`` with a launcher in front of the script: real torchrun, real accelerate, real deepspeed; each process is recorded, and one report tells of all."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from command import dtypedoctor, report_of

pytestmark = pytest.mark.slow

SCRIPT = """
import os
import sys

import torch
from torch import nn

print("arguments", sys.argv[1:], "name", __name__, "folder", os.path.basename(sys.path[0]))
rank = int(os.environ.get("RANK", 0))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
if rank == next(int(word) for word in sys.argv[1:] if word.isdecimal()):
    model[1].half()
model(torch.ones(2, 4))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the script lies."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.release
def test_torchrun_in_front_of_the_script(folder: Path) -> None:
    """The rank that fails is named, with the operator; the other one's trace lies beside it; the command can be typed again."""
    command = ("torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "1")
    done = dtypedoctor("exec", "--verify-uninstrumented", "--out", "run", *command, cwd=folder)
    report = report_of(folder / "run")
    assert report["observer"]["reason"].startswith("on rank 0, no step was completed")
    assert "the script ended in the same way" in report["observer"]["reason"]
    (finding,) = report["findings"]
    assert (finding["id"], finding["rank"]) == ("operand-dtype-mismatch", 1)
    assert "model[1]" in finding["summary"]
    assert finding["op"] == "aten.addmm.default"
    assert finding["source"].startswith("train.py:")
    assert done.code == 10
    assert sorted(path.name for path in (folder / "run" / "before").glob("rank-*")) == ["rank-0", "rank-1"]
    words = "--standalone --nproc-per-node 2 train.py 1"
    assert words in dtypedoctor("report", "run", "--format", "md", cwd=folder).out


@pytest.mark.release
def test_accelerate_in_front_of_a_healthy_script(folder: Path) -> None:
    """It runs as accelerate alone has it run, is measured, and nothing is found; no word of ranks where there is one process."""
    command = ("accelerate", "launch", "--cpu", "--num_processes", "1", "train.py", "7", "--more")
    done = dtypedoctor("exec", "--verify-uninstrumented", "--out", "run", *command, cwd=folder)
    assert f"arguments ['7', '--more'] name __main__ folder {folder.name}" in done.out
    assert report_of(folder / "run")["status"] == "healthy"
    assert done.code == 0
    assert "rank" not in done.err.partition("Nothing found")[2].partition("Reproduce")[0].replace("rank-0", "")


@pytest.mark.release
def test_a_launcher_that_does_not_come_to_the_script_is_reported_so(folder: Path) -> None:
    """Its own message is shown, and there is no record of a process that did not run."""
    done = dtypedoctor("exec", "--out", "run", "torchrun", "--no-such-option", "train.py", cwd=folder)
    assert done.code == 2
    assert "unrecognized arguments: --no-such-option" in done.err
    assert "ended with status 2 before anything could be measured" in done.err
    assert not (folder / "run").exists()


@pytest.mark.release
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_in_front_of_the_script(folder: Path) -> None:
    """Its launcher starts each rank with ``--local_rank=N`` before the script's own arguments."""
    command = ("deepspeed", "--num_gpus", "2", "train.py", "1")
    done = dtypedoctor("exec", "--out", "run", *command, cwd=folder, DS_ACCELERATOR="cpu")
    assert "arguments ['--local_rank=0', '1']" in done.out
    (finding,) = report_of(folder / "run")["findings"]
    assert (finding["id"], finding["rank"]) == ("operand-dtype-mismatch", 1)
    assert done.code == 10


def test_the_interpreter_in_front_of_the_script(folder: Path) -> None:
    """``exec python train.py`` is ``exec train.py``."""
    done = dtypedoctor("exec", "--out", "run", sys.executable, "train.py", "7", cwd=folder)
    assert "arguments ['7'] name __main__" in done.out
    assert report_of(folder / "run")["status"] == "healthy"
