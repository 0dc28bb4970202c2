"""What a script can find out about itself is the same under ``dtypedoctor exec``, watched and looked at closer."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from command import Finished, dtypedoctor, forked, python, report_of
from patience import PATIENCE

PROBE = """
import atexit, copy, hashlib, io, json, os, pickle, random, sys, threading, warnings
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader

warnings.simplefilter("error")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.head(nn.functional.dropout(self.frozen(x).relu(), 0.3))


def draw(index):
    return torch.full((8,), float(index))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return draw(index) + torch.rand(8)


def digest(data):
    return hashlib.sha256(data).hexdigest()[:12]


def facts(net, losses):
    seen = []
    handles = [net.register_forward_hook(lambda *_: seen.append("first")),
               net.head.register_forward_pre_hook(lambda *_: seen.append("head")),
               net.register_forward_hook(lambda *_: seen.append("second"))]
    net(torch.ones(1, 8))
    hooks = [len(vars(m)[name]) for m in net.modules() for name in vars(m) if name.endswith("_hooks")]
    for handle in handles:
        handle.remove()
    copied = copy.deepcopy(net)
    loaded = pickle.loads(pickle.dumps(net))
    file = io.BytesIO()
    torch.save(net, file)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(copied, backend="eager")(torch.ones(1, 8)).sum().backward()
    counters = torch._dynamo.utils.counters
    other = threading.Thread(target=lambda: losses.append(float(net(torch.ones(1, 8)))))
    other.start()
    other.join()
    return {
        "losses": losses,
        "hook order": seen,
        "hooks on modules": hooks,
        "attributes": sorted(name for m in net.modules() for name in vars(m)),
        "requires_grad": [p.requires_grad for p in net.parameters()],
        "class after pickle": type(loaded) is Net and type(loaded).__module__,
        "trained": digest(b"".join(p.detach().numpy().tobytes() for p in net.parameters())),
        "saved": len(file.getvalue()),
        "graphs": [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())],
        "python": digest(repr(random.getstate()).encode()),
        "numpy": digest(pickle.dumps(numpy.random.get_state())),
        "torch": digest(torch.get_rng_state().numpy().tobytes()),
        "settings": [torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.get_num_threads(),
                     torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu")],
        "main": [__name__, os.path.basename(__file__), __package__, sys.argv[1:], os.path.basename(os.getcwd())],
        "threads": threading.active_count(),
        "stdin": sys.stdin.read(),
        "environment": digest(json.dumps(sorted((k, v) for k, v in os.environ.items() if k not in ("PYTHONPATH", "DTYPEDOCTOR_JOB"))).encode()),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "tracing": [sys.gettrace(), sys.getprofile()],
    }


def train():
    torch.use_deterministic_algorithms(True)
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for context, workers in (("fork", 2), ("spawn", 1)):
        for batch in DataLoader(Numbers(), batch_size=2, num_workers=workers, multiprocessing_context=context):
            optimizer.zero_grad()
            loss = (net(batch) * (random.random() + numpy.random.rand())).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return net, losses


if __name__ == "__main__":
    atexit.register(print, "registered first")
    atexit.register(print, "registered last")
    print(json.dumps(facts(*train())))
    big = nn.Linear(8, 8).half()
    with torch.no_grad():
        big.weight.fill_(6e4)
    print(big(torch.ones(1, 8).half()).isfinite().any().item(), flush=True)
    sys.exit("no luck")
"""
"""Prints what it sees of itself, then overflows float16, so that exec replays it."""


def script(folder: Path, source: str, name: str = "work.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


def execute(folder: Path, *arguments: str | Path) -> Finished:
    """Runs ``dtypedoctor exec --out FOLDER/run ARGUMENTS`` in ``folder``."""
    return dtypedoctor("exec", "--once", "--out", folder / "run", *arguments, cwd=folder, OMP_NUM_THREADS="1")


def test_a_script_sees_no_difference_in_itself(tmp_path: Path) -> None:
    """Random states, hooks, pickles, graphs, loaders, threads, `__main__`, exit handlers and exit status."""
    path = script(tmp_path, PROBE)
    (tmp_path / "input.txt").write_text("a line\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
        with (tmp_path / "input.txt").open() as given:
            return subprocess.run(
                [sys.executable, *map(str, command), "--epochs", "3"],
                stdin=given, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE,
            )  # fmt: skip

    bare = run(path)
    watched = run("-m", "dtypedoctor", "exec", "--once", "--propagate-exit", "--out", "run", path)
    expected, *rest = bare.stdout.splitlines()
    assert rest == ["False", "registered last", "registered first"], bare.stderr
    seen, *others = watched.stdout.splitlines()
    assert json.loads(seen) == json.loads(expected)
    assert others[: len(rest)] == rest
    assert watched.returncode == bare.returncode == 1
    assert watched.stderr.startswith(bare.stderr)
    report = report_of(tmp_path / "run")
    assert report["findings"][0]["id"] == "float16-overflow"
    coverage = "\n".join(report["coverage"])
    assert "compiled graph(s)" in coverage
    assert "forked process(es)" in coverage


@pytest.mark.release
def test_a_failure_that_vanishes_when_it_is_watched_is_reported_so(tmp_path: Path) -> None:
    """A script that fails only where nobody has put global hooks."""
    source = """
        import torch
        from torch.nn.modules import module
        torch.nn.Linear(1, 1)(torch.ones(1, 1))
        if not module._global_forward_hooks:
            raise RuntimeError("nobody looks")
    """
    finished = execute(tmp_path, "--verify-uninstrumented", script(tmp_path, source))
    report = report_of(tmp_path / "run")
    assert finished.code == 10
    assert report["findings"] == []
    assert report["observer"]["bitwise_equal"] is False
    assert "completes with instrumentation, and raises RuntimeError (nobody looks) without" in report["headline"]
    assert report["status"] == "unknown"
    assert "Instrumentation CHANGED the run" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.release
def test_a_script_may_watch_itself(tmp_path: Path) -> None:
    """`watch()` inside of exec: both reports are written, and both name the module."""
    source = """
        import dtypedoctor, torch
        net = torch.nn.Sequential(torch.nn.Linear(4, 4)).half()
        with torch.no_grad():
            net[0].weight.fill_(6e4)
        with dtypedoctor.watch(net, out="own"):
            net(torch.ones(2, 4).half())
    """
    finished = execute(tmp_path, script(tmp_path, source))
    assert finished.code == 10, finished.err
    for directory in ("run", "own"):
        finding = report_of(tmp_path / directory)["findings"][0]
        assert (finding["id"], finding["fqn"]) == ("float16-overflow", "0")


NUMBERED = """
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    x = torch.randn(2, 4, requires_grad=True).bfloat16()
    handles = [model.register_forward_hook(lambda *_: None), x.register_hook(lambda gradient: gradient * 1)]
    loss = model(x).float().square().mean()
    handles += [loss.register_hook(lambda gradient: gradient), loss.grad_fn.register_hook(lambda *_: None)]
    loss.backward()
    optimizer.step()
    print([handle.id for handle in handles], RemovableHandle.next_id)
    for handle in handles:
        handle.remove()
"""


def test_hooks_of_a_program_have_the_numbers_that_they_have_without(tmp_path: Path) -> None:
    """Those of the doctor, some in each step, have others."""
    (tmp_path / "program.py").write_text(NUMBERED)
    alone = python("program.py", cwd=tmp_path).out
    assert len(alone.splitlines()) == 40
    assert forked("exec", "program.py", cwd=tmp_path).out == alone
