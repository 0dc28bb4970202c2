"""Calls that fail are made again in the program itself, which must notice nothing of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from exec_corpus import files_in, run_alone, treat_forked
from nursery import preload
from script_corpus import Case, cases

from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.lab.trials.judge import compare_unwatched
from dtypedoctor.lab.trials.treatment import Plan
from dtypedoctor.trace.events import Op

ONE_RUN = Plan(certify=False, only=frozenset())
OUTPUT = "output.txt"
HEALTHY = [case for case in cases() if case.healthy and not case.imports][::15]

OVERFLOW = """
import torch
from torch import nn
class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((4,), 200.0))
    def forward(self, x):
        return x * self.gain
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Scores()).half()
"""
"""A model whose second module overflows float16 where its input is large."""

BUSY = (
    OVERFLOW
    + """
import os, pathlib, random, subprocess
pathlib.Path("out").mkdir()
pathlib.Path("lines.txt").write_text("".join(f"{i}\\n" for i in range(6)))
lines = open("lines.txt")
log = open("out/log.txt", "w")
entropy = int.from_bytes(os.urandom(2), "big") / 2**16
random.seed(3)
for step in range(6):
    line = next(lines)
    print("step", int(line), random.random(), flush=step % 2 == 0)
    log.write(line)
    x = torch.full((2, 4), 1.0 + entropy if step < 4 else 30000.0).half()
    try:
        os.wait()
    except ChildProcessError:
        print("no child")
    out = model(x)
    if step == 2:
        os.unlink("lines.txt")
        subprocess.run(["true"], check=True)
    torch.save(model.state_dict(), f"out/{step}.pt")
    if not out.isfinite().all():
        log.close()
        raise SystemExit(3)
"""
)
"""Prints, writes, removes its own input, waits for children that it has not, draws from the system's entropy, and fails in call 5."""

HANGS = (
    OVERFLOW
    + """
import queue, threading
asked, answers = queue.Queue(), queue.Queue()
def serve():
    asked.get()
    answers.put(30000.0)
class Served(nn.Module):
    def forward(self, x):
        asked.put(1)
        return model(x * answers.get())
threading.Thread(target=serve).start()
Served()(torch.ones(2, 4).half())
"""
)
"""Needs an answer of another thread in the call that fails; a second one never comes."""

THREAD = (
    OVERFLOW
    + """
import threading
def work():
    for size in (1.0, 30000.0):
        print(model(torch.full((2, 4), size).half()).isfinite().all().item())
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
)
"""Calls its model in a thread, for which the main thread waits."""

CALLS = {
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)
block = Block()
for size in (1.0, 30000.0):
    block(torch.full((2, 4), size).half().requires_grad_()).float().sum().backward()
""",
    "functional": """
from torch.func import functional_call, grad, vmap
weights = dict(model.named_parameters())
def loss(weights, x):
    return functional_call(model, weights, (x,)).float().sum()
for size in (1.0, 30000.0):
    vmap(grad(loss), in_dims=(None, 0))(weights, torch.full((2, 4), size).half())
""",
    "own-function": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 200
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 200
class Scaled(nn.Module):
    def forward(self, x):
        return Scale.apply(x)
model = nn.Sequential(nn.Linear(4, 4).half(), Scaled())
for size in (1.0, 30000.0):
    model(torch.full((2, 4), size).half()).float().sum().backward()
""",
    "compiled": """
compiled = torch.compile(model)
for size in (1.0, 30000.0):
    compiled(torch.full((2, 4), size).half())
""",
}
"""Calls of that model by kind, of which the second overflows."""

WATCHED = """
import dtypedoctor
from dtypedoctor.replay.capsule import read_capsule
with dtypedoctor.watch(model, out="run", replay=True) as watched:
    for size in (1.0, 30000.0, 2.0):
        print(size, model(torch.full((2, 4), size).half()).isfinite().all().item())
found = watched.report.findings[0]
print(found.op, found.fqn, found.confidence, found.call)
kept = read_capsule(watched.directory)
print(kept.fqn, kept.cls, kept.description["kind"])
"""

WATCHED_RAISING = """
import contextlib
import dtypedoctor
from dtypedoctor.replay.capsule import read_capsule
with contextlib.suppress(RuntimeError), dtypedoctor.watch(model, out="run", replay=True) as watched:
    for dtype in (torch.float16, torch.float32):
        model(torch.ones(2, 4, dtype=dtype))
kept = read_capsule(watched.directory)
print(kept.fqn, kept.cls, kept.description["kind"])
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_program_that_changes_its_folder_is_diagnosed_from_one_run_and_left_alone(tmp_path: Path) -> None:
    """Two runs would differ. What it prints, writes and exits with is what it does alone, and nothing is there twice."""
    path = script(tmp_path, BUSY)
    (tmp_path / "watched").mkdir()
    treatment = treat_forked(path, tmp_path / "watched", ONE_RUN)
    found = treatment.findings[0]
    assert (found.id, found.fqn, found.op, found.call) == ("float16-overflow", "1", "aten.mul.Tensor", 5)
    assert found.confidence is Confidence.PROVEN
    assert "bitwise equal" in treatment.replayed
    alone = run_alone(path, tmp_path / "alone")
    assert (treatment.before.directory / OUTPUT).read_text() == (alone.directory / OUTPUT).read_text()
    assert treatment.before.exit.code == alone.exit.code == 3
    assert files_in(tmp_path / "watched" / "work") == files_in(tmp_path / "alone" / "work")


def test_a_call_that_waits_for_another_thread_is_not_made_again(tmp_path: Path) -> None:
    """What that has given once never comes again; the program ends as it would, and the report says why nothing was replayed."""
    treatment = treat_forked(script(tmp_path, HANGS), tmp_path, ONE_RUN)
    assert treatment.before.exit.code == 0
    assert "it waits for another thread" in treatment.no_op_trace


def test_a_call_in_a_thread_is_replayed(tmp_path: Path) -> None:
    """Modules may be called in any."""
    treatment = treat_forked(script(tmp_path, THREAD), tmp_path, ONE_RUN)
    assert (tmp_path / "before" / OUTPUT).read_text().split() == ["True", "False"]
    assert (treatment.findings[0].op, treatment.findings[0].confidence) == ("aten.mul.Tensor", Confidence.PROVEN)
    assert "bitwise equal" in treatment.replayed


@pytest.mark.release
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy_scripts_are_unchanged_by_replays(case: Case, tmp_path: Path) -> None:
    """With every call made again, forward and backward: the same losses, parameters after each step, output and files."""
    preload(case.imports)
    alone = run_alone(case.path, tmp_path / "alone")
    run = run_alone(case.path, tmp_path / "forced", replay="1")
    assert compare_unwatched(run, alone).bitwise_equal is not False
    assert (run.directory / OUTPUT).read_text() == (alone.directory / OUTPUT).read_text()
    assert files_in(tmp_path / "forced" / "work") == files_in(tmp_path / "alone" / "work")
    assert any(not op.sentinel for op in run.trace.all(Op))


def test_a_block_that_is_watched_names_the_operator(tmp_path: Path) -> None:
    """With ``replay=True`` the report of `watch()` has what a second run would have shown, and the failing call is kept; the block's own output is
    there once."""
    assert said_by(OVERFLOW + WATCHED, tmp_path) == [
        "1.0 True",
        "30000.0 False",
        "2.0 True",
        "aten.mul.Tensor 1 proven 2",
        "1 Scores nonfinite",
    ]


def test_a_block_that_is_watched_and_raises_leaves_the_call_that_raised(tmp_path: Path) -> None:
    """The exception leaves the block as it was raised, and the capsule is there when it does."""
    assert said_by(OVERFLOW + WATCHED_RAISING, tmp_path) == ["0 Linear raised"]


def said_by(text: str, tmp_path: Path) -> list[str]:
    """What a script that watches itself prints, without what dtypedoctor says."""
    lines = (run_alone(script(tmp_path, text), tmp_path / "once").directory / OUTPUT).read_text().splitlines()
    return [line for line in lines if not line.startswith("dtypedoctor: ")]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("kind", CALLS)
def test_each_kind_of_call_is_replayed_bitwise(kind: str, tmp_path: Path) -> None:
    """The second call overflows; the replay names the operator."""
    treatment = treat_forked(script(tmp_path, OVERFLOW + CALLS[kind]), tmp_path, ONE_RUN)
    assert (treatment.findings[0].op, treatment.findings[0].confidence) == ("aten.mul.Tensor", Confidence.PROVEN)
    assert "bitwise equal" in treatment.replayed
