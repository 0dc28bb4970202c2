"""What the tests of ``watch()`` and the callback share: a finished run directory, tiny models, and what a process looks like."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from transformers import LlamaConfig, LlamaForCausalLM

from dtypedoctor.lab.models.builtin import VOCABULARY_SIZE
from dtypedoctor.report.to_json import json_schema
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace

OWN_CODE = f"{os.sep}dtypedoctor{os.sep}"
"""In the path of every file of the package."""


def report_in(directory: Path) -> dict[str, Any]:
    """The report of a run directory, which holds what ``dtypedoctor exec`` leaves and nothing else: of what failed the replay too."""
    assert {path.name for path in directory.iterdir()} - {"closer", "capsule"} == {"before", "report.json", "report.md"}
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    jsonschema.validate(report, json_schema())
    markdown = (directory / "report.md").read_text()
    assert report["headline"] in markdown.replace("\\", "")  # which escapes the brackets of `model[1]`
    return report


def trace_in(directory: Path) -> Trace:
    return read_trace(directory / "before")


def phases_in(directory: Path) -> set[str]:
    """The phases in which something was measured."""
    trace = trace_in(directory)
    return {trace.sites[sample.site].phase for sample in trace.samples}


def overflowing() -> nn.Module:
    """In float16 its second layer, ``1``, leaves the range."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    with torch.no_grad():
        net[1].weight.fill_(6e4)
        net[0].weight.fill_(1.0)
    return net


def tiny_llama() -> LlamaForCausalLM:
    """Two layers with seeded random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def process_state() -> dict[str, Any]:
    """Everything in the process that watching might touch, as it is now."""
    return {
        "functions": [
            torch.autograd.backward, torch.autograd.grad, torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_,
            torch.amp.GradScaler.scale, torch.autocast.__enter__, torch.autocast.__exit__, torch.inference_mode.__enter__, nn.Module.load_state_dict,
            nn.Module.__call__, nn.Module.to, torch.Tensor.backward, torch.optim.Optimizer.step,
        ],
        "module hooks": [
            list(getattr(module_hooks, name))
            for name in dir(module_hooks)
            if name.startswith("_global_") and isinstance(getattr(module_hooks, name), dict)
        ],
        "asked by the compiler": module_hooks._has_any_global_hook,
        "optimizer hooks": [
            list(optimizer_hooks._global_optimizer_pre_hooks), list(optimizer_hooks._global_optimizer_post_hooks),
        ],
        "finders": list(sys.meta_path),
        "excepthook": sys.excepthook,
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
