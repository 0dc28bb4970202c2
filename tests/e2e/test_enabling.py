"""``dtypedoctor enable`` and ``DTYPEDOCTOR=1``: processes that record themselves, in a real environment of their own."""

import sys
import sysconfig
from pathlib import Path

import pytest
from command import report_of
from light_environment import Light
from patience import becomes

from dtypedoctor.cli import enabling
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.model import Request
from dtypedoctor.worker.script import request_of

TRAINING = """
import os
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
if os.environ.get("RANK", "0") == sys.argv[1]:
    model[1].half()
model(torch.ones(2, 4))
"""

PARENT = """
import subprocess
import sys

import torch

torch.nn.Linear(2, 2)(torch.ones(1, 2))
subprocess.run([sys.executable, "train.py", "0"])
"""

MODULES = "import sys; print(sorted(sys.modules))"


@pytest.fixture
def light(tmp_path: Path) -> Light:
    """An environment with two programs."""
    environment = Light(tmp_path)
    (environment.folder / "train.py").write_text(TRAINING)
    (environment.folder / "parent.py").write_text(PARENT)
    return environment


@pytest.fixture
def enabled(light: Light) -> Light:
    done = light.dtypedoctor("enable")
    assert done.code == 0, done.err
    return light


def test_recording_is_off_until_enabled_and_disable_leaves_site_packages_as_it_was(light: Light) -> None:
    """Without the variable not one more module is imported, and `disable` leaves site-packages as it was."""
    before = sorted(path.name for path in light.packages.iterdir())
    modules = light("-c", MODULES).out
    assert light.dtypedoctor("enable", "--status").code == 10
    assert light.dtypedoctor("enable").code == 0
    assert light.dtypedoctor("enable", "--status").code == 0
    hook = light.packages / "dtypedoctor-hook.pth"
    assert hook.read_bytes().isascii()
    assert light("-X", "dev", "-c", "print(1)", DTYPEDOCTOR="1").err == ""
    hook.write_text(hook.read_text().replace("hooked.py", "moved.py"))
    assert light.dtypedoctor("enable", "--status").code == 10
    assert light.dtypedoctor("enable").code == 0
    assert light("-c", MODULES).out == light("-c", MODULES, DTYPEDOCTOR="0").out == modules
    assert "dtypedoctor" in light("-c", MODULES, DTYPEDOCTOR="1").out
    assert light.dtypedoctor("disable").code == 0
    assert sorted(path.name for path in light.packages.iterdir()) == before
    assert "not enabled" in light.dtypedoctor("disable").err


def test_a_process_without_torch_ends_as_it_would(enabled: Light) -> None:
    """Its status and streams are its own, and no run directory is made; also where the interpreter is isolated or has no site-packages."""
    for options in ([], ["-I"], ["-S"], ["-E"]):
        done = enabled(*options, "-c", "import sys; print(1); sys.exit(3)", DTYPEDOCTOR="1")
        assert (done.code, done.out, done.err) == (3, "1\n", "")
    assert not (enabled.folder / "runs").exists()


def test_nothing_is_said_where_dtypedoctor_is_gone(enabled: Light) -> None:
    """`pip uninstall` leaves the file behind; it does nothing then."""
    hook = enabled.packages / "dtypedoctor-hook.pth"
    text = hook.read_text().replace("hooked.py", "uninstalled.py")
    hook.write_text(text)
    done = enabled("-c", "print(1)", DTYPEDOCTOR="1")
    assert (done.code, done.out, done.err) == (0, "1\n", "")


def test_a_script_records_itself(enabled: Light) -> None:
    """One process, one report, its own status and traceback; the command that is shown can be typed again."""
    done = enabled("train.py", "0", DTYPEDOCTOR="1")
    assert done.code == 1
    assert done.err.count("RuntimeError: mat1 and mat2 must have the same dtype") >= 1
    (run,) = (enabled.folder / "runs").iterdir()
    report = report_of(run)
    assert [(finding["id"], finding["op"]) for finding in report["findings"]] == [
        ("operand-dtype-mismatch", "aten.addmm.default")
    ]
    assert "DTYPEDOCTOR=1 python train.py 0" in (run / "report.md").read_text()
    assert sorted(path.name for path in (run / "before").glob("*-*")) == []


@pytest.mark.release
def test_all_ranks_of_a_launcher_make_one_report(enabled: Light) -> None:
    """torchrun, which imports torch itself, is the first process; the report is about the rank that failed."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", "1")
    assert enabled(*command, DTYPEDOCTOR="1").code == 1
    (run,) = (enabled.folder / "runs").iterdir()
    (finding,) = report_of(run)["findings"]
    assert (finding["id"], finding["rank"]) == ("operand-dtype-mismatch", 1)
    recorded = {path.name for path in (run / "before").glob("rank-*")}
    assert {"rank-1"} <= recorded <= {"rank-0", "rank-1"}  # torchrun may end rank 0 before that has imported torch


def test_a_program_that_a_program_becomes_is_recorded_too(enabled: Light) -> None:
    """After os.execv it is the same process, which has one report written at its end, with what failed in the second program."""
    became = "import os, sys, torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
    (enabled.folder / "first.py").write_text(f"{became}os.execv(sys.executable, [sys.executable, 'train.py', '0'])")
    done = enabled("first.py", DTYPEDOCTOR="1")
    assert done.code == 1, done.err
    (run,) = (enabled.folder / "runs").iterdir()
    assert [finding["id"] for finding in report_of(run)["findings"]] == ["operand-dtype-mismatch"]


def test_what_a_killed_program_recorded_is_moved_to_where_its_report_would_be(enabled: Light) -> None:
    """Nothing of ours lies in its folder until it ends, by SIGKILL too, and its children are its own."""
    killed = "import os, torch\nassert sorted(os.listdir('.')) == before\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))"
    count = "try:\n    os.wait()\nexcept ChildProcessError:\n    os.kill(os.getpid(), 9)"
    program = f"import os\nbefore = sorted(os.listdir('.'))\n{killed}\n{count}\n"
    (enabled.folder / "killed.py").write_text(program)
    assert enabled("killed.py", DTYPEDOCTOR="1").code == -9
    assert becomes(lambda: len(list(enabled.folder.glob("runs/killed-*/before/events.jsonl"))) == 1)


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither overwritten nor removed; and a folder that cannot be written is named, with what to do instead."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    other = tmp_path / "dtypedoctor-hook.pth"
    other.write_text("import other\n")
    for verb in (lambda: enabling.enable(status=False), enabling.disable):
        with pytest.raises(UsageError, match="not dtypedoctor's"):
            verb()
    assert other.read_text() == "import other\n"
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/proc")
    with pytest.raises(UsageError, match="cannot be written") as refused:
        enabling.enable(status=False)
    assert "dtypedoctor exec" in refused.value.hint


def test_the_request_is_what_exec_would_ask_for() -> None:
    """It is written without pydantic, so it is held against the model here."""
    made = request_of(["train.py", "1"], "")
    request = Request.model_validate(made).model_dump()
    asked = {name: value for name, value in made.items() if name != "scenario"}
    assert asked.items() <= request.items()
    assert request["replay"] is True
    assert sys.orig_argv  # what a job is named by
