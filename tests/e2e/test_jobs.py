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
