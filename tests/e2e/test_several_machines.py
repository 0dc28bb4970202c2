"""One job on two machines: two real torchrun agents on this one, each started by its own ``exec``."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import in_this_process, report_of
from patience import PATIENCE, becomes
from ports import unused_port

pytestmark = pytest.mark.slow

TRAINING = """
import signal, sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x) * gain)

def wait(*_):
    open("waits", "w").close()
    signal.pause()

net = nn.parallel.DistributedDataParallel(Net().half())
for step in (1, 2):
    gain = 1.0
    if (rank, step) == (1, 2):
        gain = {"overflow": 1e6, "dtype": torch.ones(8)}.get(sys.argv[1], 1.0)
        if sys.argv[1] == "wait":
            net.module.down.register_forward_pre_hook(wait)
    net(torch.ones(4, 8).half()).float().square().mean().backward()
dist.destroy_process_group()
"""
STATIC = ("--master-addr", "localhost", "--master-port")
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint")


def started(folder: Path, number: int, out: str, meeting: list[str], fault: str) -> "subprocess.Popen[str]":
    """The command of one machine."""
    torchrun = ["torchrun", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", *meeting]
    return subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", "exec", "--once", "--out", out, *torchrun, "train.py", fault],
        cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def meeting(*options: str) -> list[str]:
    """Options by which two agents find each other at a port that is free."""
    *rest, last = options
    host = "" if last == "--master-port" else "localhost:"
    return [*rest, last, f"{host}{unused_port()}"]


def ran(folder: Path, outs: tuple[str, str], options: tuple[str, ...], fault: str) -> list[tuple[int, str]]:
    """What both machines ended with, and what they printed on stderr."""
    (folder / "train.py").write_text(TRAINING)
    common = meeting(*options)
    both = [started(folder, number, out, common, fault) for number, out in enumerate(outs)]
    try:
        printed = [process.communicate(timeout=PATIENCE)[1] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    return [(process.returncode, err) for process, err in zip(both, printed, strict=True)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def first_of(report: dict[str, Any]) -> tuple[Any, ...]:
    finding = report["findings"][0]
    return finding["id"], finding["rank"], finding["op"], finding["confidence"]


def test_one_folder_gets_one_report_on_the_ranks_of_both_machines(tmp_path: Path) -> None:
    """Only rank 1 fails by itself: both machines say so, with its replay; each has files of its own, and no later command changes them."""
    ends = ran(tmp_path, ("job", "job"), STATIC, "overflow")
    assert [code for code, _ in ends] == [10, 10], ends
    report = report_of(tmp_path / "job")
    assert first_of(report) == ("float16-overflow", 1, "aten.mul.Tensor", "proven")
    evidence = " ".join(report["findings"][0]["evidence"])
    assert "Rank 1 of 2 was the first" in evidence
    assert "carried it to rank 0" in evidence
    assert report["next_command"].endswith("replay job/node-1/capsule --allow-code")
    assert [report_of(tmp_path / "job" / f"node-{number}")["findings"][0]["rank"] for number in (0, 1)] == [0, 1]
    left = files(tmp_path / "job")
    for number in ("0", "2"):
        again = in_this_process(
            "exec", "--out", "job", "torchrun", "--nnodes", "2", "--node-rank", number, "train.py", "overflow", cwd=tmp_path
        )  # fmt: skip
        assert (again.code, "already exists" in again.err) == (2, True), again.err
    assert files(tmp_path / "job") == left


@pytest.mark.release
def test_a_machine_that_is_killed_is_told_from_a_healthy_one(tmp_path: Path) -> None:
    """SIGKILL in the middle of a module takes dtypedoctor, agent and rank; the other machine reports what is known of its rank."""
    (tmp_path / "train.py").write_text(TRAINING)
    common = meeting(*C10D)
    both = [started(tmp_path, number, "job", common, "wait") for number in (0, 1)]
    try:
        assert becomes((tmp_path / "waits").exists)
        (lost,) = tmp_path.glob("job/node-*/before/rank-1")  # which of the two it is, the rendezvous decides
        number = int(lost.parents[1].name.removeprefix("node-"))
        both[number].send_signal(signal.SIGKILL)
        both[number].communicate(timeout=PATIENCE)
        _, err = both[1 - number].communicate(timeout=PATIENCE)
    finally:
        for process in both:
            process.kill()
            process.wait()
    report = report_of(tmp_path / "job")
    assert (both[1 - number].returncode, report["status"]) == (10, "worker-died"), err
    assert report["headline"].startswith("Rank 1 of 2 left no end record and no exit status")
    assert "module.down" in report["headline"]
    assert any(line.startswith("rank 0: ") and "another rank had ended" in line for line in report["coverage"])
    assert not (lost.parents[1] / "report.json").exists()
