"""Parts of a run are replayed from processes that stand by; the program itself must notice nothing of them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from exec_corpus import treat_forked
from forced_replays import force
from nursery import preload
from patience import becomes
from replayed import files_in, replay, run_standing_by, scenario_of
from script_corpus import Case, cases

from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.replay import standby
from dtypedoctor.replay.cage import is_supported
from dtypedoctor.replay.wake import dismiss, waiting_in
from dtypedoctor.runner.run import STDOUT
from dtypedoctor.scenario.model import Window
from dtypedoctor.trace.events import Op
from dtypedoctor.trace.records.execution import ReplayNote
from dtypedoctor.trials import replays, treatment
from dtypedoctor.trials.summary import compare_unwatched
from dtypedoctor.trials.treatment import Plan, treat

pytestmark = pytest.mark.skipif(not is_supported(), reason="Linux on x86-64 only")

ONE_RUN = Plan(certify=False, closer=False, only=frozenset())
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
    while asked.get() is not None:
        answers.put(30000.0)
class Served(nn.Module):
    def forward(self, x):
        asked.put(1)
        return model(x * answers.get())
threading.Thread(target=serve).start()
Served()(torch.ones(2, 4).half())
asked.put(None)
"""
)
"""Needs a thread, which a fork does not have, in the call that fails."""

HANGS_LATER = (
    OVERFLOW
    + """
import threading
over = threading.Event()
def watch():
    while not failed:
        over.wait(0.01)
    over.set()
failed = []
threading.Thread(target=watch).start()
model(torch.full((2, 4), 30000.0).half())
failed.append(1)
over.wait()
"""
)
"""Waits, after the call that fails, for a thread."""

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

FORKS = (
    OVERFLOW
    + """
import os
from torch.utils.data import DataLoader
child = os.fork()
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for x in DataLoader([torch.full((4,), 30000.0)] * 4, batch_size=2, num_workers=1, multiprocessing_context="fork"):
    model(x.half())
"""
)
"""Has a child of its own and a data loader with a worker."""


THREADED = (
    OVERFLOW
    + """
class Sums(nn.Module):
    def forward(self, x):
        return x + noise.sum()
torch.set_num_threads(3)
noise = torch.randn(3_000_001)
model = nn.Sequential(Sums(), Scores())
model(torch.full((2, 4), 1e38))
"""
)
"""Overflows in float32 on numbers that three threads have added up; one thread adds them up to others."""

NOISY = (
    OVERFLOW
    + """
import os
class Noise(nn.Module):
    def forward(self, x):
        return x + int.from_bytes(os.urandom(4), "big") / 2**32
model = nn.Sequential(Noise(), Scores().half())
model(torch.full((2, 4), 30000.0))
"""
).replace("return x *", "return x.half() *")
"""Draws from the system's entropy within the call that overflows; what it draws is rounded away before that."""

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
from dtypedoctor.worker import standbys
standbys.FREE_SECONDS = 1e9
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
from dtypedoctor.worker import standbys
standbys.FREE_SECONDS = 1e9
with contextlib.suppress(RuntimeError), dtypedoctor.watch(model, out="run", replay=True) as watched:
    for dtype in (torch.float16, torch.float32):
        model(torch.ones(2, 4, dtype=dtype))
kept = read_capsule(watched.directory)
print(kept.fqn, kept.cls, kept.description["kind"])
"""


def script(folder: Path, text: str) -> Path:
    """A script in a folder of its own."""
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_program_that_changes_its_folder_is_diagnosed_from_one_run_and_left_alone(tmp_path: Path) -> None:
    """Two runs would differ. What it prints, writes and exits with is what it does without standbys, and nothing is there twice."""
    path = script(tmp_path, BUSY)
    treatment = treat(scenario_of(path), lambda label, _: run_standing_by(path, tmp_path / "forced", label), ONE_RUN)
    found = treatment.findings[0]
    assert (found.id, found.fqn, found.op, found.call) == ("float16-overflow", "1", "aten.mul.Tensor", 5)
    assert found.confidence is Confidence.PROVEN
    assert "all" in treatment.replayed
    assert "are equal" in treatment.replayed
    alone = run_standing_by(path, tmp_path / "alone", watch=False)
    assert (treatment.before.directory / STDOUT).read_text() == (alone.directory / STDOUT).read_text()
    assert treatment.before.exit.code == alone.exit.code == 3
    wanted = files_in(tmp_path / "alone" / "work")
    assert files_in(tmp_path / "forced" / "work") == wanted


def test_a_replay_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a thread that it has not; the program's own run is reported."""
    monkeypatch.setattr(replays, "SHORTEST", 2.0)
    monkeypatch.setattr(replays, "SLOWER", 0.0)
    treatment = treat_forked(script(tmp_path, HANGS), tmp_path, ONE_RUN)
    assert treatment.closer is None
    assert "the replay did not end in time" in treatment.no_closer
    assert treatment.before.exit.code == 0


@pytest.mark.release
def test_a_replay_that_hangs_after_the_failure_explains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was made for has been recorded by then."""
    monkeypatch.setattr(replays, "SHORTEST", 5.0)
    monkeypatch.setattr(replays, "SLOWER", 0.0)
    treatment = treat_forked(script(tmp_path, HANGS_LATER), tmp_path, ONE_RUN)
    found = treatment.findings[0]
    assert (found.id, found.op, found.confidence) == ("float16-overflow", "aten.mul.Tensor", Confidence.PROVEN)


def test_a_call_in_a_thread_is_replayed(tmp_path: Path) -> None:
    """The fork has that thread alone."""
    treatment = treat_forked(script(tmp_path, THREAD), tmp_path, ONE_RUN)
    assert (tmp_path / "before" / "output.txt").read_text().split() == ["True", "False"]
    assert (treatment.findings[0].op, treatment.findings[0].confidence) == ("aten.mul.Tensor", Confidence.PROVEN)
    assert "bitwise identical" in treatment.replayed


@pytest.mark.release
def test_a_program_with_processes_of_its_own(tmp_path: Path) -> None:
    """Its child is waited for as ever, its data loader's worker is its own, and what overflows is found."""
    treatment = treat_forked(script(tmp_path, FORKS), tmp_path, ONE_RUN)
    assert (tmp_path / "before" / "output.txt").read_text().splitlines()[:1] == ["7"]
    assert treatment.findings[0].op == "aten.mul.Tensor"


@pytest.mark.release
def test_a_replay_has_as_many_threads_and_makes_the_same_bits(tmp_path: Path) -> None:
    """Sums are added up in the same order, so that the report can say so of the tensors that the call failed on."""
    treatment = treat_forked(script(tmp_path, THREADED), tmp_path, ONE_RUN)
    assert treatment.findings[0].op == "aten.mul.Tensor"
    assert "bitwise identical where it fails" in treatment.replayed
    assert treatment.closer is not None
    assert not treatment.closer.trace.observed(ReplayNote)


@pytest.mark.release
def test_nothing_is_proven_by_a_replay_of_other_bits(tmp_path: Path) -> None:
    """It shows the operator, and the report says by how much it differs."""
    finding = treat_forked(script(tmp_path, NOISY), tmp_path, ONE_RUN).findings[0]
    assert (finding.op, finding.confidence) == ("aten.mul.Tensor", Confidence.LIKELY)
    assert "the replay differed" in finding.evidence[-1]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy_scripts_are_unchanged_by_standbys_and_replayed_exactly(case: Case, tmp_path: Path) -> None:
    """With a standby before every call: the same losses, parameters after each step, output and files; and replays of random calls do the same."""
    preload(case.imports)
    alone = run_standing_by(case.path, tmp_path / "alone", watch=False)
    run = run_standing_by(case.path, tmp_path / "forced")
    assert compare_unwatched(run, alone).bitwise_equal is not False
    assert (run.directory / STDOUT).read_text() == (alone.directory / STDOUT).read_text()
    assert files_in(tmp_path / "forced" / "work") == files_in(tmp_path / "alone" / "work")
    drawn = random.Random(case.name)
    calls = max((sample.call for sample in run.trace.samples), default=0)
    for number in range(2 if calls else 0):
        window = Window(call=drawn.randint(1, calls), until=drawn.choice(["next-call", "backward"]))
        again, made = replay(run, f"replay-{number}", [window])
        assert again is not None, made.why_not
        assert not made.certificate(again).doubt
        assert any(op.call == window.call for op in again.trace.all(Op))
    assert files_in(tmp_path / "forced" / "work") == files_in(tmp_path / "alone" / "work")
    dismiss(run.directory)
    assert not waiting_in(run.directory)


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
    folder = tmp_path / "once"
    run_standing_by(script(tmp_path, text), folder, watch=False)
    lines = (folder / "before" / STDOUT).read_text().splitlines()
    return [line for line in lines if not line.startswith("dtypedoctor: ")]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("kind", CALLS)
def test_each_kind_of_call_is_replayed_bitwise(kind: str, tmp_path: Path) -> None:
    """The second call overflows; the replay names the operator."""
    treatment = treat_forked(script(tmp_path, OVERFLOW + CALLS[kind]), tmp_path, ONE_RUN)
    assert (treatment.findings[0].op, treatment.findings[0].confidence) == ("aten.mul.Tensor", Confidence.PROVEN)
    assert "bitwise identical where it fails" in treatment.replayed


@pytest.mark.release
@pytest.mark.parametrize("name", ["busy-threads", "fork-hooks", "modules-in-a-thread", "shared-memory"])
def test_programs_are_what_they_are_without_replays(name: str, tmp_path: Path) -> None:
    """Weights, optimizer, random states, output and files; ``python tests/e2e/forced_replays.py`` does it for all 46 programs."""
    found = force(name, tmp_path, replays=4)
    assert not found.changed
    assert (found.replays, found.killed, found.differed) == (4, 0, 0)


def test_no_process_is_left(tmp_path: Path) -> None:
    """Standbys end with the report."""
    path = script(tmp_path, OVERFLOW + "model(torch.full((2, 4), 30000.0).half())\n")
    treat_forked(path, tmp_path, ONE_RUN)
    left = lambda: [name for name in os.listdir("/proc") if name.isdecimal() and str(tmp_path) in _folder_of(name)]
    assert becomes(lambda: not left()), left()
    assert not list((tmp_path / "before").glob("standby-*"))


def test_standbys_end_with_a_program_in_which_nothing_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to dismiss them; those of a program that fails wait for the report."""
    monkeypatch.setattr(treatment, "dismiss", lambda _: None)
    monkeypatch.setattr(standby, "ORPHAN_SECONDS", 10**6)
    runs = {}
    for name, size in (("healthy", 1.0), ("failing", 30000.0)):
        (tmp_path / name).mkdir()
        path = script(tmp_path / name, OVERFLOW + f"model(torch.full((2, 4), {size}).half())\n")
        runs[name] = treat_forked(path, tmp_path / name, ONE_RUN)
    assert not runs["healthy"].findings
    assert becomes(lambda: not waiting_in(runs["healthy"].before.directory))
    assert runs["failing"].findings
    assert waiting_in(runs["failing"].before.directory)
    dismiss(runs["failing"].before.directory)


def _folder_of(process: str) -> str:
    try:
        return os.readlink(f"/proc/{process}/cwd")
    except OSError:  # it has ended, or is somebody else's
        return ""
