"""One call of a real module is kept and becomes a script that fails as it says, whatever the module holds or is given."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dtypedoctor.instrument.session import Position
from dtypedoctor.lab.worker.stage import DESCRIPTION, TENSORS, Capture
from dtypedoctor.replay.script import Claim, script_text

CLAIM = Claim(title="t", about=("a",), check="forward", limit=0.01, made_with="torch")
HALF = torch.float16


def scaled(module: nn.Module, factor: float) -> nn.Module:
    """The module in float16 with larger weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=factor, generator=torch.Generator().manual_seed(1))
    return module.half()


def recurrent() -> tuple[nn.Module, dict[str, Any]]:
    """Sums grow from step to step."""
    rnn = scaled(nn.RNN(8, 8, nonlinearity="relu", batch_first=True), 30.0)
    return rnn, {"input": torch.ones(1, 6, 8, dtype=HALF)}


def packed() -> tuple[nn.Module, dict[str, Any]]:
    linear = Linear4bit(64, 64, bias=False, compute_dtype=HALF)
    weights = torch.full((64, 64), 2e4)
    linear.weight = Params4bit(weights, requires_grad=False, quant_type="nf4", compress_statistics=True)
    return linear.to("cpu"), {"x": torch.ones(1, 64, dtype=HALF)}


def cached() -> tuple[nn.Module, dict[str, Any]]:
    """Attention scores that are too large, against keys of earlier tokens."""
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, attn_implementation="eager")
    cache = DynamicCache()
    keys = torch.full((1, 2, 3, 8), 2e4, dtype=HALF)
    cache.update(keys, torch.ones_like(keys), 0)
    table = torch.ones(1, 1, 8, dtype=HALF)
    return scaled(LlamaAttention(config, 0), 1.0), {
        "hidden_states": torch.ones(1, 1, 16, dtype=HALF),
        "position_embeddings": (table, torch.zeros_like(table)),
        "attention_mask": torch.zeros(1, 1, 1, 4, dtype=HALF),
        "past_key_values": cache,
    }


def experts() -> tuple[nn.Module, dict[str, Any]]:
    """A configuration was told which implementation to use after it was made."""
    config = MixtralConfig(hidden_size=16, intermediate_size=16, num_local_experts=2)
    config._experts_implementation = "batched_mm"
    return scaled(MixtralExperts(config), 100.0), {
        "hidden_states": torch.ones(3, 16, dtype=HALF),
        "top_k_index": torch.zeros(3, 1, dtype=torch.int64),
        "top_k_weights": torch.ones(3, 1, dtype=HALF),
    }


def written(module: nn.Module, given: dict[str, Any], directory: Path) -> str:
    """Keeps a call of ``module``, and leaves the script and its tensors in ``directory``."""
    position = Position(call=1)
    capture = Capture(nn.ModuleDict({"part": module}), "part", call=1, position=position)
    with torch.no_grad():
        module(**given)
    capture.write(directory)
    shutil.copyfile(directory / TENSORS, directory / "repro.safetensors")
    text = script_text(json.loads((directory / DESCRIPTION).read_text()), CLAIM, configs=True)
    (directory / "repro.py").write_text(text)
    return text


def said(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and last line of the script there."""
    spec = importlib.util.spec_from_file_location("repro", directory / "repro.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    capsys.readouterr()
    status: int = script.main()
    return status, capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("make", [recurrent, packed, cached, experts])
def test_a_kept_call_becomes_a_script_that_fails_as_it_says(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float16 something that leaves the module is not finite, in float32 everything is."""
    module, given = make()
    text = written(module.eval(), given, tmp_path)
    assert "dtypedoctor" not in text
    assert "'training': False" in text
    status, line = said(tmp_path, capsys)
    assert status == 1, line
    assert line.startswith("FAILS: ")
    assert line.endswith("elements are inf or NaN in torch.float16")


class Ring(nn.Module):
    """Is given an object that holds itself."""

    def forward(self, x: Tensor, ring: "Link") -> Tensor:
        by_layer: dict[int, Tensor] = ring.by_layer
        return x * ring.scale * by_layer[0]


class Link:
    """Holds itself, a number, and a tensor under a number."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.by_layer = {0: torch.tensor(scale, dtype=HALF)}
        self.next = self


def test_an_object_that_holds_itself_is_kept_as_far_as_it_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its description has an end."""
    written(Ring(), {"x": torch.ones(2, dtype=HALF), "ring": Link(300.0)}, tmp_path)
    assert said(tmp_path, capsys) == (1, "FAILS: the output: 2 of 2 elements are inf or NaN in torch.float16")
