"""Several processes: real torchrun, two ranks over gloo, tiny models."""

import os
import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command import DRIVER, Finished, dtypedoctor, forked, python, report_of
from nursery import preload
from patience import becomes

from dtypedoctor.trace.events import Op
from dtypedoctor.trace.lines import CURSOR, read_entered
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.ranks import LEADING
from dtypedoctor.trace.reader import read_trace

BEGIN = """
    import os, signal, sys
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(rank)
"""
DDP = (
    BEGIN
    + """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.down(self.up(x) * gain)

    gain = 1.0
    fault = sys.argv[1]
    net = nn.parallel.DistributedDataParallel(Net().half())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(1, 4):
        x = torch.randn(4, 8, generator=data).half()
        gain = 1e6 if (fault, rank, step) == ("overflow", 1, 2) else 1.0
        if (fault, rank, step) == ("dtype", 1, 2):
            gain = torch.ones(8)
        if (fault, rank, step) == ("kill", 1, 2):
            net.module.down.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if (fault, rank, step) == ("hang", 1, 2):
            net.module.down.register_forward_pre_hook(lambda *_: (open("hangs", "w").close(), signal.pause()))
        loss = (net(x).float() ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank} has come to its end\\n", end="")  # in one piece: both ranks write to one stream
    dist.destroy_process_group()
"""
)
PIPELINE = (
    BEGIN
    + """
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.down(self.up(x) * gain)

    def passed(*pairs):
        for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, 1 - rank) for way, tensor in pairs]):
            work.wait()

    gain = 1.0
    stage = Stage().half()
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3)
    for step in range(1, 4):
        gain = 1e6 if (rank, step) == (0, 2) else 1.0
        if rank == 0:
            out = stage(torch.randn(4, 8, generator=data).half())
            gradient = torch.empty_like(out)
            passed((dist.isend, out.detach()))
            passed((dist.irecv, gradient))
            out.backward(gradient)
        else:
            arrived = torch.empty(4, 8, dtype=torch.half)
            passed((dist.irecv, arrived))
            arrived.requires_grad_()
            (stage(arrived).float() ** 2).mean().backward()
            passed((dist.isend, arrived.grad))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module", autouse=True)
def libraries_are_imported_once() -> None:
    """Launchers and ranks are forked from a process that has them."""
    preload(frozenset({"torch.distributed.run", "torch.distributed.fsdp"}))


def written(folder: Path, text: str, name: str) -> Path:
    """Writes a script or a scenario."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def execute(
    folder: Path, source: str, *arguments: str, command: Callable[..., Finished] = forked
) -> tuple[Finished, Path]:
    """``dtypedoctor exec --nproc-per-node 2`` on a script, options before ``--`` and the script's own arguments behind it.

    The doctor, torchrun and the ranks are forks; with ``command=dtypedoctor`` they are interpreters.
    """
    path, out = written(folder, source, "work.py"), folder / "run"
    options, own = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    return command("exec", "--nproc-per-node", "2", "--out", out, *options, path, *own, OMP_NUM_THREADS="1"), out


def ranks_of(out: Path) -> list[Trace]:
    return [read_trace(out / "before" / f"rank-{rank}") for rank in (0, 1)]


def said(report: dict[str, Any]) -> str:
    """The evidence of the first finding, in one text."""
    return "\n".join(report["findings"][0]["evidence"])


def test_a_healthy_ddp_run_has_no_findings_and_is_bitwise_what_it_is_unwatched(tmp_path: Path) -> None:
    """Each rank has a trace and its own output; each is equal to itself without the watch, and nothing is called not covered."""
    finished, out = execute(tmp_path, DDP, "--once", "--verify-uninstrumented", "--", "ok")
    assert finished.code == 0, finished.err
    report = report_of(out)
    assert (report["status"], report["findings"]) == ("healthy", [])
    assert report["observer"]["bitwise_equal"] is True
    assert report["observer"]["reason"].startswith("on each of 2 ranks")
    assert not [line for line in report["coverage"] if line.startswith("rank ")]
    for rank, trace in enumerate(ranks_of(out)):
        assert trace.header is not None
        assert (trace.header.rank, trace.header.world_size) == (rank, 2)
        assert f"rank {rank} has come to its end" in finished.out.splitlines()  # without a word before it


def test_an_overflow_on_one_rank_is_told_with_the_all_reduce_that_carried_it(tmp_path: Path) -> None:
    """Rank, module and op of the origin, and the collective by which it came to the rank whose own gradients were finite."""
    finished, out = execute(tmp_path, DDP, "--once", "--", "overflow")
    assert finished.code == 10
    report = report_of(out)
    first = report["findings"][0]
    assert (first["id"], first["fqn"], first["op"]) == ("float16-overflow", "module", "aten.mul.Tensor")
    assert (first["rank"], first["phase"], first["step"], first["confidence"]) == (1, "forward", 2, "proven")
    assert "Rank 1 of 2 was the first" in said(report)
    assert (
        "The all_reduce in the backward pass of step 2 (float16, [144], among ranks 0, 1) carried it to rank 0"
        in said(report)
    )
    assert (out / "before" / LEADING).resolve().name == "rank-1"


WITH_BUFFERS = DDP.replace(
    "self.up, self.down = nn.Linear(8, 8)", "self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 8)"
).replace("self.up(x) *", "self.norm(self.up(x)) *")
"""Broadcasts buffers before each forward."""


@pytest.mark.release
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("overflow", ("float16-overflow", "aten.mul.Tensor")),
        ("dtype", ("operand-dtype-mismatch", "aten.addmm.default")),
    ],
)
def test_the_rank_that_failed_is_replayed_alone(fault: str, wanted: tuple[str, str], tmp_path: Path) -> None:
    """One run is enough: the call is replayed without the other rank, no collective is issued, and nothing hangs."""
    finished, out = execute(tmp_path, WITH_BUFFERS, "--once", "--", fault)
    assert finished.code == 10
    report = report_of(out)
    first = report["findings"][0]
    assert (first["id"], first["op"], first["rank"], first["step"]) == (*wanted, 1, 2)
    assert any("replayed in the process itself, at the moment" in line for line in report["coverage"])


TRAINING = Path(__file__).with_name("sharded_training.py")


def trained(tmp_path: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], list[str], Path]:
    """The report on two ranks of ``sharded_training.py``, run once, and the line in which each rank says what it has trained."""
    out = tmp_path / "run"
    command = ("exec", "--once", "--nproc-per-node", "2", "--out", out, TRAINING, *arguments)
    done = forked(*command, OMP_NUM_THREADS="1", **environment)
    return report_of(out), sorted(line for line in done.out.splitlines() if ": weights" in line), out


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["fsdp", "forward"], ("float16-overflow", "blocks.2", "aten.mul.Tensor", "forward")),
        (["fsdp", "forward", "--recompute"], ("float16-overflow", "blocks.2", "aten.mul.Tensor", "forward")),
        (["fsdp", "backward"], ("backward-overflow", "blocks.2", "aten.mul.Tensor", "backward")),
        (["fsdp", "dtype"], ("operand-dtype-mismatch", "blocks.2.up", "aten.addmm.default", "forward")),
    ],
    ids=["forward", "recomputed", "backward", "dtype"],
)
def test_a_failing_call_of_fsdp_is_replayed_while_its_parameters_are_unsharded(
    arguments: list[str], wanted: tuple[str, str, str, str], tmp_path: Path
) -> None:
    """The rank that failed replays the call of the unit alone, in the process itself, and leaves a capsule."""
    report, _, out = trained(tmp_path, *arguments)
    first = report["findings"][0]
    assert (first["id"], first["fqn"], first["op"], first["phase"]) == wanted
    assert (first["rank"], first["step"], first["confidence"]) == (1, 2, "proven")
    at_the_moment = "replayed in the process itself" + ("" if os.path.exists(DRIVER) else ", at the moment")
    assert any(at_the_moment in line for line in report["coverage"])  # on a device it is known later
    assert not any("dtypedoctor failed there" in line for line in report["coverage"])
    again = forked("replay", out / "capsule", "--allow-code", cwd=tmp_path)
    assert f"Same verdict as in the run: {wanted[0]}, {wanted[2]}" in again.said, again.out


@pytest.mark.release
@pytest.mark.parametrize(("fault", "finding"), [("forward", "float16-overflow"), ("backward", "backward-overflow")])
def test_a_failure_that_is_known_after_its_unit_was_resharded_is_replayed_with_copies(
    fault: str, finding: str, tmp_path: Path
) -> None:
    """Known when the next step begins, as on a device: the optimizer has spoilt the parameters, and the copies are those of the call."""
    report, _, out = trained(tmp_path, "fsdp", fault, "--ahead", DTYPEDOCTOR_REPLAY_IN_PLACE="late")
    first = report["findings"][0]
    assert (first["id"], first["fqn"], first["op"]) == (finding, "blocks.2", "aten.mul.Tensor")
    assert (first["rank"], first["step"], first["phase"], first["confidence"]) == (1, 2, fault, "proven")
    assert any("with copies of the parameters; the results are bitwise equal" in line for line in report["coverage"])
    assert (out / "capsule").is_dir()


@pytest.mark.release
def test_a_collective_of_the_failing_call_ends_its_replay_and_is_named(tmp_path: Path) -> None:
    """The call has an all_reduce of its own: nothing hangs, both ranks come to their end, and the report says why there is no op trace."""
    report, ended, _ = trained(tmp_path, "fsdp", "collective")
    assert len(ended) == 2
    assert (report["findings"][0]["rank"], report["findings"][0]["step"]) == (1, 2)
    assert any("all_reduce needs the other ranks" in line for line in report["coverage"])


def without_dtypedoctor(*script: str) -> Finished:
    """The script on two ranks."""
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script, OMP_NUM_THREADS="1")


@pytest.mark.release
@pytest.mark.parametrize("arguments", [["fsdp"], ["ddp"], ["fsdp", "--recompute"]], ids=" ".join)
def test_forced_replays_leave_the_results_of_all_ranks_bitwise_unchanged(arguments: list[str], tmp_path: Path) -> None:
    """Weights, optimizer states, losses and random states, although each call of each unit is made again, forward and backward."""
    strategy, *others = arguments
    report, forced, out = trained(tmp_path, strategy, "none", *others, DTYPEDOCTOR_REPLAY_IN_PLACE="1")
    of_the_training = ["optimizer-epsilon-underflow"] if strategy == "ddp" else []  # whose parameters are float16
    assert [one["id"] for one in report["findings"]] == of_the_training
    assert not any("dtypedoctor failed there" in line or "replay" in line for line in report["coverage"])
    phases = {(op.call, op.phase) for trace in ranks_of(out) for op in trace.all(Op)}
    assert {(call, phase) for call in (1, 2, 3, 4) for phase in ("forward", "backward")} <= phases
    bare = without_dtypedoctor(str(TRAINING), strategy, "none", *others)
    if bare.code:  # another test's job may have taken its port in between
        bare = without_dtypedoctor(str(TRAINING), strategy, "none", *others)
    assert bare.code == 0, bare.err
    assert forced == sorted(line for line in bare.out.splitlines() if ": weights" in line)
    assert len(forced) == 2


@pytest.mark.release
def test_an_overflow_in_one_stage_of_a_pipeline_is_told_with_the_message_that_carried_it(tmp_path: Path) -> None:
    """There is no collective at all: the second stage gets infinities, and sends gradients that are not finite back."""
    finished, out = execute(tmp_path, PIPELINE, "--rerun", "--")
    assert finished.code == 10
    report = report_of(out)
    first = report["findings"][0]
    assert (first["id"], first["rank"], first["op"], first["step"]) == ("float16-overflow", 0, "aten.mul.Tensor", 2)
    assert (
        "The send from rank 0 to rank 1 in the forward pass of step 2 (float16, [4, 8]) carried it: rank 0 sent"
        in said(report)
    )


def test_a_killed_rank_is_named_with_its_last_module(tmp_path: Path) -> None:
    """SIGKILL in the middle of a module; the other rank only tells of a lost connection."""
    finished, out = execute(tmp_path, DDP, "--", "kill", command=dtypedoctor)
    assert finished.code == 10
    report = report_of(out)
    assert report["status"] == "worker-died"
    assert report["headline"].startswith("Rank 1 of 2 was killed by SIGKILL")
    assert "module.down" in report["headline"]
    assert "in step 2 (forward)" in report["headline"]
    assert report["coverage"][1].startswith("rank 1: was killed by SIGKILL")


@pytest.mark.release
def test_a_rank_that_hangs_is_told_from_the_one_that_waits_for_it(tmp_path: Path) -> None:
    """Both are stopped at the time limit; the report is about the one that never entered the collective."""
    elsewhere, late = tmp_path / "elsewhere", tmp_path / "work" / "late"
    for folder in (elsewhere, late.parent):
        folder.mkdir()

    def wait_for_both() -> None:
        def entered(rank: int) -> int:
            (cursor,) = elsewhere.glob(f"*/before/rank-{rank}/{CURSOR}")
            return read_entered(cursor.read_bytes()) or 0

        if becomes((late.parent / "hangs").exists) and becomes(lambda: entered(0) > entered(1)):
            late.touch()

    waiting = threading.Thread(target=wait_for_both)
    waiting.start()
    command = partial(dtypedoctor, cwd=late.parent, late_with=late, TMPDIR=str(elsewhere))
    finished, out = execute(late.parent, DDP, "--time-limit", "2000", "--", "hang", command=command)
    waiting.join()
    assert finished.code == 10
    report = report_of(out)
    assert report["status"] == "worker-died"
    assert report["headline"].startswith("Rank 1 of 2 was stopped at its time limit")
    assert "module.down" in report["headline"]
    assert "never entered the next one, in which others wait" in report["coverage"][1]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["exec", "--nproc-per-node", "0", "work.py"], {}, "nproc"),
        (["exec", "--nproc-per-node", "65", "work.py"], {}, "nproc"),
        (["exec", "--nproc-per-node", "two", "work.py"], {}, "nproc"),
        (["exec", "--nproc-per-node", "2", "missing.py"], {}, "missing.py: no such script"),
        (["exec", "--nproc-per-node", "2", "work.py"], {"RANK": "0", "WORLD_SIZE": "2"}, "one of several already"),
        (["run", "sequential_loads_sampling", "--nproc-per-node", "2"], {}, "several processes run a script"),
    ],
)
def test_what_cannot_be_distributed_is_refused(
    arguments: list[str], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    """Exit 2 with what is wrong, no traceback, and nothing left behind."""
    written(tmp_path, "print(1)", "work.py")
    finished = dtypedoctor(*arguments, cwd=tmp_path, **environment)
    assert finished.code == 2
    assert message in finished.err
    assert "Traceback" not in finished.err
    assert [path.name for path in tmp_path.iterdir()] == ["work.py"]
