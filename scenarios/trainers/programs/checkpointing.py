"""Gradient checkpointing under autocast in transformers' Trainer: which families, ways and dtypes fail, and which do not.

    python checkpointing.py [FAMILY ...]

Prints a line for each: the loss of the first step, beside that without checkpointing, or what was raised. float16 needs CUDA.
"""

import sys

import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import QUIET
from torch import nn
from transformers import Trainer, TrainingArguments

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = SIZES | {"num_key_value_heads": 4}
FAMILIES = {
    "Llama": GROUPED,
    "Gemma3": GROUPED | {"head_dim": 16},
    "Mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GptOss": GROUPED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_of(family: str, adapters: bool) -> nn.Module:
    """A model with seeded weights; with adapters its base is bfloat16."""
    torch.manual_seed(3407)
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**FAMILIES[family]))
    if not adapters:
        return model
    return get_peft_model(model.to(torch.bfloat16), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def first_loss(family: str, dtype: str, way: str, adapters: bool) -> str:
    """Of two steps, or what was raised."""
    settings = QUIET | {"max_steps": 2, "gradient_checkpointing": way != "none"}
    ways = {"gradient_checkpointing_kwargs": {"use_reentrant": way == "reentrant"}}
    rows = [{"input_ids": list(range(5, 25)), "labels": list(range(5, 25))} for _ in range(16)]
    arguments = TrainingArguments(bf16=dtype == "bfloat16", fp16=dtype == "float16", **settings, **ways)
    try:
        trainer = Trainer(model=model_of(family, adapters), args=arguments, train_dataset=rows)
        trainer.train()
    except (RuntimeError, ValueError) as error:
        return f"raises {type(error).__name__}: {error}".splitlines()[0]
    return f"{trainer.state.log_history[0]['loss']:.4f}"


for family in sys.argv[1:] or FAMILIES:
    for dtype in ("bfloat16", "float16") if torch.cuda.is_available() else ("bfloat16",):
        for adapters in (False, True):
            results = [f"{way} {first_loss(family, dtype, way, adapters)}" for way in ("none", "reentrant", "not")]
            print(family, dtype, "LoRA on bfloat16" if adapters else "float32 weights", *results, sep="\t", flush=True)
