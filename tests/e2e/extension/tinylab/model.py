"""A language model of one gated layer, whose product leaves float16's range where `gain` is large."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY = 32


class GatedLayer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, hidden, bias=False)
        self.down = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (batch, tokens, hidden)."""
        return self.down(self.gate(x) * self.up(x))


class GatedForCausalLM(nn.Module):
    """Embedding, gated layer, head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.layer = GatedLayer(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.head(self.layer(self.embed(input_ids)))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def build(*, hidden: int = 16, gain: float = 1.0) -> nn.Module:
    """The model on the CPU, in float32; dtypedoctor seeds torch before and casts it afterwards."""
    model = GatedForCausalLM(hidden)
    with torch.no_grad():
        model.layer.gate.weight.mul_(gain)
        model.layer.up.weight.mul_(gain)
        model.layer.down.weight.div_(gain)
    return model
