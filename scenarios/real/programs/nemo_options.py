"""What each way proposed for float32 norms before the LoRA layers of NeMo Automodel does, measured against the model in float32.

    pip install --no-deps --target wheels/nemo_automodel-0.4.0 nemo_automodel==0.4.0
    PYTHONPATH=wheels/nemo_automodel-0.4.0 python scenarios/real/programs/nemo_options.py [cost]

Prints a line for each: the relative error of the logits of a tiny Llama, or the message of what was raised. ``cost`` trains a
larger one and prints the time of a training step and its peak memory beside those with the list emptied, which NeMo Automodel's own fix did.
"""

import copy
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import bitsandbytes
import torch
from nemo_automodel.components._peft import lora
from nemo_automodel.components.models.common import utils
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
LARGER = {
    "cpu": TINY | {"hidden_size": 256, "intermediate_size": 512},
    "cuda": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
    },
}[DEVICE]
TEXTS = {"cpu": (2, 128), "cuda": (4, 2048)}[DEVICE]
"""Texts in a training step, and their tokens."""
ROUNDS, STEPS = 7, 5
NORMS = ["post_attention_layernorm", "input_layernorm", "norm"]


def cast_norm_outputs(model: nn.Module) -> None:
    """Each norm answers in the dtype of its input."""
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(lambda _, inputs, out: out.to(inputs[0].dtype))


def cast_lora_inputs(model: nn.Module) -> None:
    """The pull request: each LoRA layer casts its input to its weight's dtype."""
    for module in model.modules():
        if isinstance(module, lora.LinearLoRA):
            module.register_forward_pre_hook(lambda layer, inputs: inputs[0].to(layer.weight.dtype))


@dataclass(frozen=True)
class Option:
    """One way out: which modules are kept in float32, what is done to the model, and whether the head has LoRA too."""

    name: str
    kept: list[str]
    change: Callable[[nn.Module], Any] = lambda model: None
    autocast: bool = False
    head: bool = False


OPTIONS = (
    Option("norms kept in float32", NORMS),
    Option("the list emptied", []),
    Option("autocast bfloat16", NORMS, autocast=True),
    Option("norm outputs cast", NORMS, cast_norm_outputs),
    Option("cast again, honoring the list", NORMS, lambda model: utils.cast_model_to_dtype(model, torch.bfloat16)),
    Option("cast again, ignoring the list", NORMS, lambda model: model.to(torch.bfloat16)),
    Option("cast at the LoRA input", NORMS, cast_lora_inputs),
    Option("cast at the LoRA input, head with LoRA", NORMS, cast_lora_inputs, head=True),
)


def plain(sizes: dict[str, int]) -> nn.Module:
    """A Llama in float32 whose norms do something."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)).to(DEVICE)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
    return model


def adapted(option: Option, model: nn.Module) -> nn.Module:
    """The model cast as its list says, with LoRA layers, changed as the option says."""
    model._keep_in_fp32_modules = option.kept
    utils.cast_model_to_dtype(model, torch.bfloat16)
    targets = ["*_proj", "lm_head"] if option.head else ["*_proj"]
    lora.apply_lora_to_linear_modules(model, lora.PeftConfig(target_modules=targets, dim=4, use_triton=False))
    option.change(model)
    return model


def error(got: Callable[[], Tensor], wanted: Tensor) -> str:
    """The relative error, or what was raised."""
    try:
        with torch.no_grad():
            return f"{float((got().float() - wanted).norm() / wanted.norm()):.5f}"
    except RuntimeError as raised:
        return f"raises: {raised}"


def logits_error(option: Option, sizes: dict[str, int]) -> str:
    """Of the adapted model, before it is trained."""
    reference = plain(sizes)
    model = adapted(option, copy.deepcopy(reference))
    ids = torch.randint(0, sizes["vocab_size"], (4, 32), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.no_grad():
        wanted = reference(input_ids=ids).logits
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=option.autocast):
        return error(lambda: model(input_ids=ids).logits, wanted)


def packed_layer_error(x: Tensor, cast: bool) -> str:
    """Of a LoRA layer over a packed weight, with the pull request's cast at its input or without it."""
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to(DEVICE)
    lora.patch_linear_module(layer, dim=4, use_triton=False, lora_dtype=torch.bfloat16)
    dense = bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state).float()
    return error(lambda: layer(x.to(layer.weight.dtype) if cast else x), x.float() @ dense.t())


class Trained:
    """A model that is trained a few steps at a time."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.model = adapted(option, plain(LARGER))
        self.optimizer = torch.optim.AdamW([one for one in self.model.parameters() if one.requires_grad], lr=1e-4)
        self.ids = torch.randint(0, LARGER["vocab_size"], TEXTS, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def step(self) -> None:
        """One training step."""
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=self.option.autocast):
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self) -> float:
        """Of one step, the mean of a few."""
        wait()
        began = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        wait()
        return (time.perf_counter() - began) / STEPS


def wait() -> None:
    """Until the device has done what was asked."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_of_a_step(trained: Trained) -> float:
    """MiB above what is in use between two steps, on CUDA; 0 on a CPU."""
    if DEVICE == "cpu":
        return 0.0
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trained.step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def cost() -> None:
    """Prints step times, the options by turns so that all have the same company, and peaks."""
    trained = []
    for option in OPTIONS:
        one = Trained(option)
        try:
            one.step()
        except RuntimeError as raised:
            print(option.name, f"raises: {raised}", sep="\t")
            continue
        trained.append(one)
    peaks = [peak_of_a_step(one) for one in trained]
    times = [[one.seconds() for one in trained] for _ in range(ROUNDS)]
    base = next(place for place, one in enumerate(trained) if not one.option.kept)
    for place, one in enumerate(trained):
        ratios = sorted(row[place] / row[base] for row in times)
        weights = sum(tensor.nbytes for tensor in one.model.parameters()) / 2**20
        print(
            one.option.name,
            f"{median(row[place] for row in times) * 1e3:.2f} ms",
            f"{median(ratios):.3f} times ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            f"weights {weights:.2f} MiB, a step {peaks[place]:.0f} MiB more",
            f"error {logits_error(one.option, LARGER)}",
            sep="\t",
            flush=True,
        )


def main() -> None:
    """Prints the table of errors."""
    for option in OPTIONS:
        print(option.name, logits_error(option, TINY), sep="\t")
    x = torch.randn(8, 64).bfloat16().to(DEVICE)
    print("packed layer, bfloat16 input", packed_layer_error(x, cast=False), sep="\t")
    print("packed layer, cast at the LoRA input", packed_layer_error(x, cast=True), sep="\t")


if __name__ == "__main__":
    cost() if sys.argv[1:] == ["cost"] else main()
