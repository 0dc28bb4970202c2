"""A program may replace functions of the standard library: the doctor's own do not go through them."""

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import dtypedoctor, report_of
from patience import PATIENCE

import dtypedoctor as package

pytestmark = pytest.mark.release

REPLACING = """
import builtins, inspect, io, json, os, random, sys, threading, time, traceback
encode = json.JSONEncoder().encode
json.dumps = lambda value, default=None, option=None: encode(value).encode()  # as orjson has it
json.loads = lambda text: None
import torch
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
def train():
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
train()  # torch imports more of itself meanwhile
def refuse(*_, **__):
    raise AttributeError("this is the program's own")
class Log:
    def write(self, text, level):
        raise RuntimeError("a level is needed")
    def flush(self):
        pass
builtins.print = builtins.open = io.open = refuse
time.perf_counter = time.monotonic = os.getpid = os.fstat = os.write = os.close = refuse
traceback.extract_tb = inspect.unwrap = random.getstate = threading.Thread = threading.Lock = refuse
sys.stderr = Log()
train()
train()
sys.stdout.write("trained")
"""


def test_a_script_that_replaces_the_standard_library_is_watched(tmp_path: Path) -> None:
    """It ends as without the doctor, everything is measured, and nothing of the doctor's failed."""
    script = tmp_path / "train.py"
    script.write_text(REPLACING)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=PATIENCE)
    finished = dtypedoctor("exec", "--out", tmp_path / "run", script)
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, "trained", "")
    assert (finished.code, finished.out[:7]) == (0, "trained")
    report = report_of(tmp_path / "run")
    assert report["status"] == "healthy"
    assert report["coverage"] == []


def test_a_watch_from_inside_writes_its_report_without_the_programs_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``json.dumps = orjson.dumps`` and ``builtins.print = tqdm.write`` are ordinary code."""

    def refuse(value: Any) -> Any:
        raise TypeError("other arguments are needed")

    for owner, name in ((json, "dumps"), (json, "loads"), (builtins, "print")):
        monkeypatch.setattr(owner, name, refuse)
    with package.watch(out=tmp_path / "run"):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    monkeypatch.undo()
    assert report_of(tmp_path / "run")["status"] == "healthy"
