"""A model of 128 modules in which chosen ones overflow in real float16, alone or by the doing of another."""

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 32, 8
BLOCKS, PARTS = 16, 7
NAMES = tuple(f"blocks.{block}.parts.{part}" for block in range(BLOCKS) for part in range(PARTS))
"""The parts that something can be planted in: 112, which with the 16 blocks are 128 modules."""


class Part(nn.Module):
    """Scales its input, and does what it was planted for.

    The first channel of the hidden state is a signal between parts; nothing else reads it. What overflows is multiplied by
    zero, so it leaves NaN behind in float16 and nothing at all in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.role = "plain"

    def forward(self, x: Tensor) -> Tensor:
        signal = x[..., :1]
        if self.role == "overflows":
            return x * self.scale + 0.0 * ((1.0 + 0.0 * signal) * 300.0 * 300.0)
        if self.role == "absorbs":  # 2048 + 1 is 2048 in float16, so the signal is 0 there and 1 in float32
            signal = (2048.0 + 0.0 * signal + 1.0) - 2048.0
        elif self.role == "overflows-without-signal":
            x, signal = x + 0.0 * ((300.0 - 299.0 * signal) * 300.0), 0.0 * signal
        elif self.role == "overflows-with-signal":
            x, signal = x + 0.0 * ((1.0 + 299.0 * signal) * 300.0), 0.0 * signal
        return torch.cat((signal, (x * self.scale)[..., 1:]), dim=-1)


class Block(nn.Module):
    """Parts, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(PARTS))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class PlantedModel(nn.Module):
    """Embedding, 16 blocks of seven parts, and a head that does not see the signal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH - 1, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = torch.cat((torch.zeros_like(hidden[..., :1]), hidden[..., 1:]), dim=-1)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden[..., 1:])
        return logits


def planted(roles: dict[str, str]) -> PlantedModel:
    """The model with these roles, by the name of the part."""
    torch.manual_seed(0)
    model = PlantedModel()
    for name, role in roles.items():
        model.get_submodule(name).role = role
    return model
