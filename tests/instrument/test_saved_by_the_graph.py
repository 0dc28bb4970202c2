"""What autograd saves is the program's: nothing that measures makes a graph, which hooks of the program for saved tensors would see."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_in_place import in_place
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A layer in half precision between two in float32; a spoilt one returns NaN, a large one leaves float16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        half = torch.relu(self.up(x)).half() * self.factor
        return x + self.down((half * half).float()) + half.sum()


def spoils(blocks: list[Block], step: int) -> None:
    blocks[1].factor = float("nan") if step >= 2 else 1.0


def overflows(blocks: list[Block], step: int) -> None:
    blocks[1].factor = 1000.0 if step >= 2 else 1.0


def spoils_a_weight(blocks: list[Block], step: int) -> None:
    if step == 2:
        with torch.no_grad():
            blocks[0].up.weight[0] = torch.nan


def is_fine(blocks: list[Block], step: int) -> None:
    del blocks, step


Changed = Callable[[list[Block], int], None]
KINDS: list[Changed] = [spoils, overflows, spoils_a_weight, is_fine]


def trained(change: Changed, saved: list[torch.Size], *, again: bool) -> None:
    """Trains for five steps, with recomputation where ``again``, and notes the shape of each tensor that the graph saves."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    optimizer = torch.optim.SGD([p for block in blocks for p in block.parameters()], lr=1e-3)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    for step in range(5):
        change(blocks, step)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            x = torch.randn(4, 8, requires_grad=True)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if again else block(x)
            loss = x.pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("change", KINDS)
def test_a_graph_saves_what_it_saves_without_the_watch(tmp_path: Path, change: Changed, again: bool) -> None:
    """Also where something is not finite, which is measured closely; torch's checkpoint counts what is saved, and would raise."""
    bare: list[torch.Size] = []
    trained(change, bare, again=again)
    watched: list[torch.Size] = []
    in_place(tmp_path, lambda: trained(change, watched, again=again))
    assert watched == bare
