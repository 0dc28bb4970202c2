"""Model factories that the tests of ``bisect`` name as ``bisect_factories:NAME``: tiny modules with real arithmetic."""

import os
import signal
import time
from types import SimpleNamespace

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 64, 16
TOO_LARGE = 3e5
"""Beyond float16's 65504, and no matter to float32."""


class Tower(nn.Module):
    """Token ids through an embedding, blocks and a head: a language model and nothing else."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.logits(hidden)
        if labels is None:
            return SimpleNamespace(logits=logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of each token, from the last hidden state."""
        logits: Tensor = self.head(hidden)
        return logits


class Plain(nn.Module):
    """A residual block that stays small."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Overflowing(Plain):
    """The same by way of an intermediate that float16 cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * TOO_LARGE / TOO_LARGE


class Peak(Plain):
    """Has a part whose output is close to what float16 can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.clamp = nn.Hardtanh(60000, 60001)

    def forward(self, x: Tensor) -> Tensor:
        clamped: Tensor = self.clamp(x)
        return super().forward(x) + clamped / 1e8


class Rescued(Plain):
    """Overflows where a clamp makes it finite again, and right."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.clamp(self.linear(x).abs() * 1e7, max=1.0)


class NoLogarithm(Plain):
    """Takes the logarithm of what is negative: NaN in any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.log(-torch.exp(self.linear(x)))


class Untouchable(Overflowing):
    """Overflows, and refuses to run once its forward was replaced."""

    def forward(self, x: Tensor) -> Tensor:
        if "forward" in self.__dict__:
            raise ValueError("somebody has replaced my forward")
        return super().forward(x)


class Slow(Overflowing):
    """Overflows after a while, so that there is time to interrupt it."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return super().forward(x)


def healthy() -> nn.Module:
    """Does not fail in float16."""
    return Tower(Plain(), Plain())


def domain() -> nn.Module:
    """Fails in float32 as well."""
    return Tower(Plain(), NoLogarithm())


def overflowing() -> nn.Module:
    """Overflows in the own operators of its second block."""
    return Tower(Plain(), Overflowing())


def untouchable() -> nn.Module:
    """Fails otherwise as soon as the culprit is kept in float32."""
    return Tower(Plain(), Untouchable())


def weights_too_large() -> nn.Module:
    """Holds a weight that float16 has no number for, and does not need it exactly."""
    block = Plain()
    with torch.no_grad():
        block.linear.weight[0, 0] = TOO_LARGE
    return Tower(Plain(), block)


def nearly() -> nn.Module:
    """Comes near to the end of float16's range, and stays in it."""
    return Tower(Plain(), Peak())


def rescued() -> nn.Module:
    """Healthy by its outputs, and not sound."""
    return Tower(Plain(), Rescued())


def stalling() -> nn.Module:
    """Most of its weights are 1 or -1, where bfloat16 rounds the updates of a usual learning rate away."""
    blocks = [Plain() for _ in range(8)]
    for block in blocks:
        with torch.no_grad():
            block.linear.weight.sign_()
    return Tower(*blocks)


def does_not_fit() -> nn.Module:
    """Is killed while it is built, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    return healthy()


def crashes_early() -> nn.Module:
    """Crashes while it is built."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return healthy()


def slow() -> nn.Module:
    """Overflows, a tenth of a second a call."""
    return Tower(*(Plain() for _ in range(6)), Slow(), *(Plain() for _ in range(6)))
