"""GRPO with LoRA on a tiny Gemma-4 by TRL's trainer, with or without the patches of a released unsloth_zoo.

    python zoo_gemma4.py FOLDER|none DTYPE STEPS [LEARNING_RATE [count]]
    python zoo_gemma4.py FOLDER|none DTYPE cost|values

FOLDER is an unpacked wheel of unsloth_zoo, ``-`` the one on ``sys.path``; ``none`` leaves transformers as it is. unsloth_zoo compiles its MLP
unless ``UNSLOTH_COMPILE_DISABLE=1``. Two weights of the first MLP are scaled, so that its product reaches the magnitude of the trained model.
Prints the reward, the loss and the norm of the gradient of each step; with ``count``, how many outputs of the MLPs' last
layers were not finite. ``cost`` prints what one MLP of Gemma-4 E2B's size takes for a forward and a
backward pass, ``values`` how far its output and its gradients are from those in float64.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextMLP
from trl import GRPOConfig, GRPOTrainer

from dtypedoctor.lab.models.builtin import byte_tokenizer
from dtypedoctor.lab.tickets.gemma4 import gemma4_tiny

sys.path.insert(0, str(Path(__file__).parent))
import zoo_patches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main(patches: str, dtype_name: str, what: str, rate: str = "5e-2", *words: str) -> None:
    """Does what is asked for, after the patches, as a program that imports unsloth first."""
    if patches != "none":
        zoo_patches.apply(patches, "gemma4.patch_Gemma4TextMLP")
    dtype = getattr(torch, dtype_name)
    if what == "cost":
        cost(mlp(dtype), dtype)
    elif what == "values":
        for scale in (1, 300):
            print(f"weights times {scale}", *values(scale, dtype), sep="\t")
    else:
        train(dtype, int(what), float(rate), counting="count" in words)


def train(dtype: torch.dtype, steps: int, rate: float, *, counting: bool) -> None:
    """Trains for ``steps`` steps with this learning rate, or until the trainer raises."""
    torch.manual_seed(3407)
    model: Any = gemma4_tiny()
    with torch.no_grad():
        for name in ("gate_proj", "up_proj"):
            model.get_parameter(f"model.layers.0.mlp.{name}.weight").mul_(550)
    for parameter in model.parameters():  # not model.to(), which would round the rotary table
        parameter.data = parameter.data.to(dtype)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)).to(DEVICE)
    follower = Follower()
    overflowed = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def count(out: Tensor) -> None:
        overflowed.add_((~out.detach().isfinite()).sum())

    for name, module in model.named_modules():
        if counting and name.endswith("mlp.down_proj"):
            module.register_forward_hook(lambda _, __, out: count(out))
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=2,
            max_completion_length=8, max_steps=steps, learning_rate=rate, lr_scheduler_type="constant", seed=3407, use_cpu=DEVICE == "cpu",
            bf16=False, fp16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=distinct, args=settings, train_dataset=prompts(), processing_class=byte_tokenizer(),
            callbacks=[follower],
        )  # fmt: skip
        try:
            trainer.train()
        finally:
            print(f"{len(follower.seconds)} steps, median {median(follower.seconds or [0]):.3f} s", flush=True)
        if counting:
            print(f"{int(overflowed)} outputs of down_proj were not finite", flush=True)


class Follower(TrainerCallback):
    """Prints what the trainer logs of each step, and takes its time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the clock."""
        self.seconds.append(time.perf_counter() - self._began)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Prints one line of each step."""
        if logs and "reward" in logs:
            numbers = (f"{name} {logs[name]:.6g}" for name in ("reward", "loss", "grad_norm"))
            print("step", state.global_step, *numbers, sep="\t")


def prompts() -> Dataset:
    """Sums, each as a message of a user."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {i}+{i + 1}?"}]} for i in range(8)])


def distinct(completions: list[Any], **_: Any) -> list[float]:
    """Rewards variety: the number of distinct characters, over ten."""
    return [len(set(one[0]["content"])) / 10 for one in completions]


def mlp(dtype: torch.dtype, hidden: int = 1536, intermediate: int = 6144, scale: float = 1.0) -> nn.Module:
    """Gemma-4's MLP with the weights that torch initializes it with, gate and up times ``scale``."""
    torch.manual_seed(0)
    config: Any = gemma4_tiny().config
    config.hidden_size, config.intermediate_size = hidden, intermediate
    layer = Gemma4TextMLP(config, 0)
    with torch.no_grad():
        layer.gate_proj.weight.mul_(scale)
        layer.up_proj.weight.mul_(scale)
    return layer.to(DEVICE, dtype)


def cost(layer: nn.Module, dtype: torch.dtype) -> None:
    """Prints milliseconds and MiB (on CUDA) for 4 texts of 1,024 tokens (on a CPU of 64), with gradients of weights and input."""
    x = torch.randn(4, 1024 if DEVICE == "cuda" else 64, 1536, device=DEVICE, dtype=dtype, requires_grad=True)
    taken = []
    for turn in range(60 if DEVICE == "cuda" else 6):
        if turn == 20 and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        layer(x).sum().backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - began))
    later = taken[len(taken) // 3 :]
    peak = f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if DEVICE == "cuda" else ""
    print(f"median {median(later):.3f} ms, least {min(later):.3f} ms", peak)


def values(scale: float, dtype: torch.dtype) -> list[str]:
    """Relative errors of the output, of the input's gradient and of the gate's, against float64; how many elements are not finite."""
    found = []
    torch.manual_seed(1)
    x = torch.randn(64, 256, device=DEVICE).to(dtype)
    weight = torch.randn(64, 256, device=DEVICE)
    exact, layer = mlp(torch.float64, 256, 1024, scale), mlp(dtype, 256, 1024, scale)
    for own, original in zip(layer.parameters(), exact.parameters(), strict=True):
        original.data.copy_(own.data)  # the same weights, rounded once
    for name, (a, b) in zip(("output", "gradient of the input", "gradient of the gate"),
                            zip(results(layer, x, weight, scale), results(exact, x.double(), weight.double(), scale), strict=True), strict=True):  # fmt: skip
        lost = int((~a.isfinite()).sum())
        found.append(
            f"{name} {float((a.double() - b).norm() / b.norm()):.2g}" + (f" ({lost} not finite)" if lost else "")
        )
    return found


def results(layer: Any, x: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, ...]:
    """The output, and the gradients of the sum of its product with ``weight``, divided by ``scale``."""
    x = x.clone().requires_grad_()
    out = layer(x)
    ((out.to(weight.dtype) * weight).sum() / scale).backward()
    assert x.grad is not None
    return out.detach(), x.grad, layer.gate_proj.weight.grad


if __name__ == "__main__":
    main(*sys.argv[1:])
