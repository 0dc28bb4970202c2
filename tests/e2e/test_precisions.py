"""The table of dtypes that a report has: asked for, beside what parameters, collectives, gradients and optimizers had."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from command import forked, report_of

PARALLEL = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(8, 32)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""

COMPRESSED = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(2):
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""

KEPT = """
    import sys, torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained("t5")
    model = T5ForConditionalGeneration.from_pretrained("t5", dtype=torch.float16)
    if sys.argv[1] == "half":
        model.half()
    model(input_ids=torch.arange(1, 9)[None], labels=torch.arange(1, 5)[None]).loss.backward()
"""


def rows_of(folder: Path, source: str, *options: str, arguments: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    (folder / "train.py").write_text(textwrap.dedent(source))
    forked("exec", "--once", "--out", "run", *options, "train.py", *arguments, cwd=folder, OMP_NUM_THREADS="1")
    rows: list[dict[str, Any]] = report_of(folder / "run")["precisions"]
    return rows


def test_a_policy_that_tensor_parallel_collectives_do_not_follow_is_marked(tmp_path: Path) -> None:
    """pytorch#190626: FSDP2's reduce_dtype says nothing to the all-reduce of a tensor-parallel backward pass."""
    rows = rows_of(tmp_path, PARALLEL, "--nproc-per-node", "2")
    assert [(row["part"], row["parameters"]) for row in rows] == [("0", 4), ("1", 4)]
    for row in rows:
        assert row["asked"] == "bfloat16 to compute, float32 to reduce"
        assert (row["stored"], row["computed"], row["reduced"]) == ("float32", "bfloat16", "bfloat16")
        assert (row["gradient"], row["optimizer"], row["broken"]) == ("float32", "float32", ["reduced"])
    assert "**bfloat16 (!)**" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.release
def test_gradients_that_a_hook_of_ddp_compresses_are_reduced_in_its_dtype(tmp_path: Path) -> None:
    """Everything else is float32."""
    (row,) = rows_of(tmp_path, COMPRESSED, "--nproc-per-node", "2")
    assert (row["stored"], row["reduced"], row["gradient"], row["optimizer"]) == (
        "float32",
        "float16",
        "float32",
        "float32",
    )


@pytest.mark.parametrize(("mode", "broken"), [("loaded", []), ("half", ["stored"])])
def test_modules_that_a_model_keeps_in_float32_are_marked_where_they_are_not(
    tmp_path: Path, mode: str, broken: list[str]
) -> None:
    """T5 keeps ``wo`` in float32; ``half()`` after loading undoes it."""
    rows = rows_of(tmp_path, KEPT, arguments=(mode,))
    kept = [row for row in rows if row["asked"] == "float32 kept by the model"]
    assert sum(row["parameters"] for row in kept) == 2
    assert all(row["broken"] == broken for row in kept)
    assert all(row["broken"] == [] for row in rows if row not in kept)


def test_a_program_in_float32_has_no_table(tmp_path: Path) -> None:
    """Nothing was asked for, and all is float32."""
    rows = rows_of(tmp_path, "import torch\ntorch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()\n")
    assert rows == []
    assert "asked for, and had" not in (tmp_path / "run" / "report.md").read_text()
