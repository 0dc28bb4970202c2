"""Model factories that scenarios of the tests name as ``factories:NAME``."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.models.gemma4 import modeling_gemma4

from dtypedoctor.lab.tickets.gemma4 import gemma4_tiny


class RenamedInput(modeling_gemma4.Gemma4TextMLP):
    """The same MLP whose forward calls its input by another name."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


def renamed_mlp_input() -> nn.Module:
    """A Gemma-4 whose MLP does not have the signature that the correction was written for."""
    model = gemma4_tiny()
    for layer in model.model.layers:
        layer.mlp.__class__ = RenamedInput
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(550)
        model.model.layers[0].mlp.up_proj.weight.mul_(550)
    return model


class _Deadly(nn.Module):
    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        self.end()
        return x


def _with(module: nn.Module) -> nn.Module:
    model = gemma4_tiny()
    model.model.layers[1].mlp = module
    return model


def killed() -> nn.Module:
    """Dies by SIGKILL inside its second MLP, as under the kernel's out-of-memory killer."""
    return _with(_Deadly(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def crashes() -> nn.Module:
    """Dies by SIGSEGV inside its second MLP."""
    return _with(_Deadly(lambda: os.kill(os.getpid(), signal.SIGSEGV)))


def hangs(note: str) -> nn.Module:
    """Never returns from its second MLP; the file ``note`` says that it was entered."""

    def hang() -> None:
        Path(note).touch()
        time.sleep(2000)

    return _with(_Deadly(hang))


def raises() -> nn.Module:
    """Cannot be built."""
    raise LookupError("the weights are in another castle")


def not_a_model() -> str:
    return "weights"
