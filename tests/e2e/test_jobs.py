"""Jobs whose ranks do not do the same: reports of two gloo ranks."""

import textwrap
from pathlib import Path

import pytest
from command import forked, report_of

BEGIN = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
"""


def written(folder: Path, text: str) -> Path:
    """A script that begins as all of them do."""
    path = folder / "work.py"
    path.write_text(textwrap.dedent(BEGIN + text))
    return path


AVERAGED = """
    dtypes = {0: torch.float16, 1: getattr(torch, sys.argv[1])}
    head = nn.Linear(4, 4).to(dtypes[rank])
    for _ in range(3):
        loss = head(torch.ones(2, 4, dtype=head.weight.dtype)).square().mean().detach()
        dist.all_reduce(loss)
    print("average", loss.item() / 2)
    dist.destroy_process_group()
"""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("other", "status"), [("bfloat16", "findings"), ("float32", "worker-died")])
def test_ranks_that_reduce_two_dtypes_are_told_with_both(other: str, status: str, tmp_path: Path) -> None:
    """Of one size the sum is wrong without a word; of another size the process is aborted in a thread of gloo."""
    path, out = written(tmp_path, AVERAGED), tmp_path / "run"
    finished = forked("exec", "--once", "--nproc-per-node", "2", "--out", out, path, other, OMP_NUM_THREADS="1")
    assert finished.code == 10, finished.err
    report = report_of(out)
    first = report["findings"][0]
    line = 1 + path.read_text().splitlines().index("    dist.all_reduce(loss)")
    assert (first["id"], first["op"], first["source"]) == ("collective-dtype-mismatch", "all_reduce", f"work.py:{line}")
    assert (
        first["summary"] == f"all_reduce gets float16 on rank 0 (work.py:{line}), {other} on rank 1 (work.py:{line})."
    )
    assert report["status"] == status


SPAWNED = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    total = torch.nn.Linear(4, 1)(torch.ones(1, 4)).detach().to(torch.bfloat16 if rank else torch.float16)
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.release
def test_ranks_that_a_script_spawns_are_compared(tmp_path: Path) -> None:
    """They have no number from a launcher; the process group knows it."""
    path, out = tmp_path / "work.py", tmp_path / "run"
    path.write_text(SPAWNED)
    finished = forked("exec", "--once", "--out", out, path, tmp_path / "store", OMP_NUM_THREADS="1")
    assert finished.code == 10, finished.err
    (first,) = report_of(out)["findings"]
    assert first["id"] == "collective-dtype-mismatch"
    assert "float16 on rank 0 (work.py:11), bfloat16 on rank 1 (work.py:11)" in first["summary"]


UNEVEN = """
    def load(number):
        raise ValueError(f"bad shard {number}")

    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    for step in range(3):
        net(torch.ones(2, 4)).sum().backward()
        if step == 1 and rank == 1:
            load(step)
        dist.barrier()
"""


@pytest.mark.release
def test_each_rank_that_raised_is_told_with_the_programs_own_line_and_torchrun_names_the_program(
    tmp_path: Path,
) -> None:
    """One raised by itself; the other one waited for it, so that its exception is the consequence. There is one next command."""
    path, out = written(tmp_path, UNEVEN), tmp_path / "run"
    torchrun = ("torchrun", "--standalone", "--nproc-per-node", "2")
    finished = forked("exec", "--once", "--out", out, *torchrun, path, OMP_NUM_THREADS="1")
    assert finished.code == 10, finished.err
    lines = path.read_text().splitlines()
    raises = 1 + lines.index('    raise ValueError(f"bad shard {number}")')
    report = report_of(out)
    assert f"rank 1 of 2: ValueError at work.py:{raises} in call 2 (forward): bad shard 1" in report["headline"]
    first, second = report["coverage"][:2]
    assert second.startswith(f"rank 1: ValueError at work.py:{raises} in call 2 (forward): bad shard 1, last in ")
    waits = 1 + lines.index("    dist.barrier()")
    ended = "was ended by its launcher (SIGTERM) after another process had failed"
    assert f"RuntimeError at work.py:{waits}, because another rank had ended: " in first or ended in first
    assert f"{path} FAILED" in finished.err
    assert "boot.py" not in finished.err
    assert finished.err.split().count("Next") == 1
