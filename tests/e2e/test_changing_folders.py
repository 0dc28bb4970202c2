"""Scripts that change their folder, or that no second run would repeat, are diagnosed from one run, which leaves the folder as they leave it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from replayed import files_in, run_standing_by, scenario_of

from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.replay.cage import is_supported
from dtypedoctor.trials.treatment import Plan, treat

pytestmark = pytest.mark.skipif(not is_supported(), reason="Linux on x86-64 only")

ONE_RUN = Plan(certify=False, closer=False, only=frozenset())

MODEL = """
import csv, json, os, pathlib, random, shutil, sqlite3, subprocess, tempfile, time
import torch
from torch import nn

class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((4,), 200.0))
    def forward(self, x):
        return x * self.gain

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Gain()).half()
with torch.no_grad():
    model[0].weight.copy_(torch.eye(4))
    model[0].bias.zero_()

def batch(size):
    return torch.full((2, 4), size).half()
"""
"""A model whose second module overflows float16 for batches of 400 and more."""

SCRIPTS = {
    "resumes from its checkpoint": """
        start = torch.load("last.pt")["step"] if os.path.exists("last.pt") else 0
        for step in range(start, start + 4):
            model(batch(4.0 ** (step + 2)))
            torch.save({"step": step + 1, "model": model.state_dict()}, "last.pt")
        """,
    "makes its output folder and fails if it exists": """
        os.mkdir("output")
        for step in range(4):
            model(batch(4.0 ** (step + 2)))
            pathlib.Path("output", f"{step}.txt").write_text(str(step))
        """,
    "removes its input": """
        pathlib.Path("input.json").write_text(json.dumps([10.0, 20.0, 40.0, 1000.0]))
        sizes = json.loads(pathlib.Path("input.json").read_text())
        os.unlink("input.json")
        for size in sizes:
            model(batch(size))
        """,
    "takes its work out of a queue of files": """
        os.mkdir("queue")
        for number, size in enumerate((10.0, 20.0, 40.0, 1000.0)):
            pathlib.Path("queue", f"{number}.txt").write_text(str(size))
        os.mkdir("done")
        for path in sorted(pathlib.Path("queue").iterdir()):
            size = float(path.read_text())
            os.rename(path, pathlib.Path("done", path.name))
            model(batch(size))
        """,
    "draws from the system's entropy": """
        chance = int.from_bytes(os.urandom(4), "big") / 2**32
        for step in range(4):
            model(batch(10.0 + chance if step < 3 else 1000.0 + 100.0 * chance))
        """,
    "is seeded by the clock and the process": """
        random.seed(time.time_ns() ^ os.getpid())
        for step in range(4):
            model(batch(random.uniform(1.0, 2.0) if step < 3 else random.uniform(1000.0, 2000.0)))
        """,
    "appends to a log": """
        for step in range(4):
            out = model(batch(4.0 ** (step + 2)))
            with open("log.csv", "a", newline="") as log:
                csv.writer(log).writerow([step, bool(out.isfinite().all())])
        """,
    "counts its runs in a database": """
        with sqlite3.connect("runs.db") as runs:
            runs.execute("create table if not exists step (number integer)")
            for step in range(4):
                model(batch(4.0 ** (step + 2)))
                runs.execute("insert into step values (?)", (step,))
                runs.commit()
        """,
    "works in a folder that it deletes": """
        with tempfile.TemporaryDirectory(dir=".") as place:
            for step in range(4):
                pathlib.Path(place, "batch.txt").write_text(str(4.0 ** (step + 2)))
                model(batch(float(pathlib.Path(place, "batch.txt").read_text())))
        """,
    "replaces its files by renaming": """
        for step in range(4):
            pathlib.Path("state.tmp").write_text(str(step))
            os.replace("state.tmp", "state.txt")
            model(batch(4.0 ** (step + 2)))
        shutil.copy("state.txt", "final.txt")
        """,
    "takes a lock that it gives back at the end": """
        lock = os.open("lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        for step in range(4):
            os.write(lock, b"step\\n")
            model(batch(4.0 ** (step + 2)))
        os.rename("lock", "released")
        """,
    "asks another program in each step": """
        for step in range(4):
            told = subprocess.run(["echo", str(step + 2)], capture_output=True, text=True, check=True).stdout
            model(batch(4.0 ** int(told)))
            pathlib.Path("told.txt").write_text(told)
        """,
}
"""Each overflows in its fourth call."""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_one_run_finds_the_operator_and_leaves_the_files_of_one_run(text: str, tmp_path: Path) -> None:
    """A fork stands by before each call; what it replays writes nothing, so the folder is that of the script alone."""
    path = tmp_path / "script.py"
    path.write_text(MODEL + textwrap.dedent(text), encoding="utf-8")
    treatment = treat(scenario_of(path), lambda label, _: run_standing_by(path, tmp_path / "watched", label), ONE_RUN)
    found = treatment.findings[0]
    assert (found.id, found.fqn, found.op, found.call) == ("float16-overflow", "1", "aten.mul.Tensor", 4)
    assert found.confidence is Confidence.PROVEN, treatment.replayed or treatment.no_closer
    assert treatment.rerun.startswith("--rerun --try ")  # of the failure nothing is missing, only of its fix
    run_standing_by(path, tmp_path / "alone", watch=False)
    assert files_in(tmp_path / "watched" / "work").keys() == files_in(tmp_path / "alone" / "work").keys()
