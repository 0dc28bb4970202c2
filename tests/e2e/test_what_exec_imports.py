"""What ``exec`` costs, in counts: modules imported in its own process and in the script's, and processes started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNTED = """
import json, subprocess, sys

started = []
Popen = subprocess.Popen

class Counted(Popen):
    def __init__(self, command, *args, **kwargs):
        started.append([command, sorted(sys.modules)])
        super().__init__(command, *args, **kwargs)

subprocess.Popen = Counted
from dtypedoctor.cli.main import main
sys.argv = ["dtypedoctor", "exec", "--out", "run", "train.py"]
try:
    main()
finally:
    with open("counted.json", "w") as file:
        json.dump({"started": started, "modules": sorted(sys.modules)}, file)
"""

SCRIPT = """
import json, sys
import torch

torch.nn.Linear(2, 2)(torch.ones(1, 2))
average = torch.zeros(2, 2).half()
for number in range(3):
    average.mul_(0.9).add_(torch.ones(2, 2).half() * torch.full((2,), number / 7).half())
with open(sys.argv[1] if sys.argv[1:] else "modules.json", "w") as file:
    json.dump(sorted(sys.modules), file)
"""

NOT_FOR_A_SCRIPT = {
    "yaml",
    "multiprocessing.forkserver",
    "rich.live",
    "dtypedoctor.lab.cli.running",
    "dtypedoctor.lab.cli.bisecting",
    "dtypedoctor.report.files",
    "dtypedoctor.report.to_html",
    "dtypedoctor.lab.runner.launch",
    "dtypedoctor.runner.view",
    "dtypedoctor.lab.scenarios",
    "dtypedoctor.lab.trials",
    "torch",
}
ONLY_AFTER_THE_START = {
    "dtypedoctor.analysis",
    "dtypedoctor.diagnosis",
    "dtypedoctor.report.build",
    "dtypedoctor.rules",
    "dtypedoctor.lab.trials.treatment",
    "rich.console",
}
MOST_BEFORE_THE_START = 340
"""Modules in the command's process when the script is started: 320 with typer 0.25 and pydantic 2.13."""
ALLOWED_IN_THE_SCRIPT = {
    "dtypedoctor", "torch", "sitecustomize", "encodings", "getpass", "resource", "sysconfig", "sysconfigdata", "termios",
}  # fmt: skip
"""What the script's process may import that the script does not: the package, and what it needs beside torch."""


def _root(module: str) -> str:
    """``torch`` of ``torch.nn``; without what only tells a module in C from its Python part."""
    return module.partition(".")[0].lstrip("_").partition("__")[0]


def test_exec_imports_and_starts_no_more_than_it_needs(tmp_path: Path) -> None:
    """Two processes: its guardian, and the script, both started before the diagnosis is imported."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    subprocess.run([sys.executable, "-c", COUNTED], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run([sys.executable, "train.py", "bare.json"], cwd=tmp_path, check=True)
    counted = json.loads((tmp_path / "counted.json").read_text(encoding="utf-8"))
    assert [command[-1] == "train.py" for command, _ in counted["started"]] == [False, True]
    at_start = set(counted["started"][0][1])
    assert not at_start & ONLY_AFTER_THE_START
    assert len(at_start) <= MOST_BEFORE_THE_START
    assert not set(counted["modules"]) & NOT_FOR_A_SCRIPT
    bare, watched = (
        set(json.loads((tmp_path / name).read_text(encoding="utf-8"))) for name in ("bare.json", "modules.json")
    )
    foreign = {name for name in watched - bare if _root(name) not in ALLOWED_IN_THE_SCRIPT}
    assert (
        not foreign
    )  # sympy, say, adds a filter for warnings, after which those that the program has shown are shown again


COLLECTED = """
import gc, json, sys

found = []

def note(phase, details):
    frame, names = sys._getframe(), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if details["generation"] == 2:
        found.append("_torch_is_there" in names)

gc.callbacks.append(note)
import torch

torch.nn.Linear(2, 2)(torch.ones(1, 2))
with open("collected.json", "w") as file:
    json.dump({"during the start": sum(found), "all": len(found), "goes on": gc.isenabled()}, file)
"""


@pytest.mark.release
def test_starting_the_instruments_goes_through_no_objects_of_torch(tmp_path: Path) -> None:
    """They are imported beside these, all of which a full collection of garbage would visit; after that Python collects as before."""
    (tmp_path / "train.py").write_text(COLLECTED, encoding="utf-8")
    command = [sys.executable, "-m", "dtypedoctor", "exec", "--out", "run", "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found = json.loads((tmp_path / "collected.json").read_text(encoding="utf-8"))
    assert found["all"] > 0
    assert found["during the start"] == 0
    assert found["goes on"] is True


ENDING = """
import atexit, sys
from dtypedoctor.__main__ import main

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
atexit.register(print, "registered")
sys.argv = ["dtypedoctor", *sys.argv[1:]]
main()
"""


def test_the_command_ends_without_taking_its_objects_apart() -> None:
    """What was registered for the end is done, the status is the command's, and nothing printed is lost."""
    for argument, status, printed in (("--version", 0, "dtypedoctor"), ("--no-such-option", 2, "")):
        ended = subprocess.run([sys.executable, "-c", ENDING, argument], check=False, capture_output=True, text=True)
        assert ended.returncode == status
        assert ended.stdout.startswith(printed)
        assert ended.stdout.endswith("registered\n")
