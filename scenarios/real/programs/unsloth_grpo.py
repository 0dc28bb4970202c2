"""GRPO with LoRA by TRL's trainer on a tiny 4-bit Llama, saved in float16 and run in bfloat16, through a released unsloth's own kernels.

    python unsloth_grpo.py FOLDER STEPS [saved] [autocast]

FOLDER is an unpacked wheel, or ``-`` for the unsloth on ``sys.path``. With ``saved`` the quantization states say float16, as in a checkpoint that was saved
in float16. Before and after training it prints the mean KL divergence, per token and in nats, from the same model with its packed weights dequantized to
float32 and everything computed in float32: for a whole text, and for its tokens decoded one at a time, of two texts and of one.
"""

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from dtypedoctor.lab.models.builtin import SPECIAL_TOKENS, VOCABULARY_SIZE, byte_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
import unsloth_kernels
from unsloth_two_loads import DEVICE, llama, through_unsloth
from zoo_gemma4 import distinct, prompts


def main(folder: str, steps: str, *words: str) -> None:
    """Measures, trains and measures again."""
    utils, lora = unsloth_kernels.load(folder)
    model = llama(torch.bfloat16, (*words, "lora"), VOCABULARY_SIZE)
    for name, token in SPECIAL_TOKENS.items():
        setattr(model.config, name, token)
        setattr(model.generation_config, name, token)
    through_unsloth(model, utils, lora, words)
    print("before", *distances(model, words), sep="\t", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=2, max_completion_length=8,
            max_steps=int(steps), learning_rate=1e-2, seed=3407, use_cpu=DEVICE == "cpu", bf16="autocast" in words, fp16=False,
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=distinct,
            args=settings,
            train_dataset=prompts(),
            processing_class=byte_tokenizer(),
        )
        trainer.train()
    print(f"trained {trainer.state.global_step} steps")
    print("after", *distances(model, words), sep="\t")


def distances(model: Any, words: tuple[str, ...]) -> list[str]:
    """The divergences of three uses, or what they raise."""
    tokens = torch.arange(32, device=DEVICE).reshape(2, 16) * 11 % 256 + 4
    reference = in_float32(model)
    found = []
    model.eval()
    for use, texts, at_once in (
        ("whole texts", 2, True),
        ("decoding two texts", 2, False),
        ("decoding one text", 1, False),
    ):
        if texts == 1 and DEVICE == "cpu":
            continue  # unsloth decodes one text by a kernel of CUDA's
        with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled="autocast" in words):
            try:
                logits = model(input_ids=tokens[:texts]).logits if at_once else decoded(model, tokens[:texts])
            except RuntimeError as raised:
                found.append(f"{use}: {str(raised).splitlines()[0]}")
                continue
        with torch.no_grad():
            expected = reference(input_ids=tokens[:texts]).logits.log_softmax(-1)
        divergence = (expected.exp() * (expected - logits.float().log_softmax(-1))).sum(-1).mean()
        found.append(f"{use}: {float(divergence):.2g}")
    model.train()
    return found


def decoded(model: Any, tokens: Tensor) -> Tensor:
    """The logits of ``tokens`` (texts, length), given one at a time."""
    cache, logits = None, []
    for place in range(tokens.shape[1]):
        out = model(input_ids=tokens[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


def in_float32(model: Any) -> nn.Module:
    """The same model of plain float32 layers: packed weights dequantized to float32, adapters merged in float32."""
    plain = LlamaForCausalLM(model.config)
    inner = model.base_model.model
    for name, parameter in plain.named_parameters():
        layer = inner.get_submodule(name.rpartition(".")[0])
        parameter.data = weight_in_float32(layer).reshape(parameter.shape).cpu()
    return plain.to(DEVICE).eval()


def weight_in_float32(layer: Any) -> Tensor:
    """Its weight with the adapter's product, if it has any."""
    base = getattr(layer, "base_layer", layer)
    weight = base.weight
    if hasattr(weight, "quant_state"):
        state = copy.copy(weight.quant_state)
        state.dtype = torch.float32
        weight = bnb.dequantize_4bit(weight.data, state)
    weight = weight.detach().float()
    if base is not layer:
        weight = weight + layer.scaling["default"] * (
            layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
        )
    return weight.detach()


if __name__ == "__main__":
    main(*sys.argv[1:])
