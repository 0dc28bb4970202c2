"""Trains a tiny model of a family whose published checkpoints leave float16's range, with the trainer that is installed.

    python overflow.py gemma2|gemma3|opt|t5 float16|bfloat16 [loaded]

The weights are seeded; a few are as large as in the tickets: the norms after attention and MLP of Gemma-2 and Gemma-3, of which the
residual stream is the sum; the last product of T5's MLP (``wo``); the queries of OPT, whose padded rows the mask pushes below the
smallest number. LoRA adapters are trained, in float32. ``loaded`` saves and loads the
model: transformers keeps T5's ``wo`` and the rotary tables in float32, which a cast of the whole model rounds. Prints the losses.
"""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from tiny import QUIET, questions, tokenizer, variety
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SPECIAL = {"vocab_size": 300, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
GEMMA = SPECIAL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
GEMMA |= {"num_key_value_heads": 4, "head_dim": 16}


def gemma(family: str) -> nn.Module:
    """The norms after attention and MLP multiply by 1 plus their weight."""
    made = (
        Gemma2ForCausalLM(Gemma2Config(**GEMMA)) if family == "gemma2" else Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA))
    )
    layer = made.model.layers[0]
    layer.post_attention_layernorm.weight.data.fill_(18_000)
    layer.post_feedforward_layernorm.weight.data.fill_(18_000)
    return made


def opt() -> nn.Module:
    """Every score of a query with a key is below -16, so that adding float16's smallest number gives -inf."""
    config = OPTConfig(
        hidden_size=64, ffn_dim=128, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=64, max_position_embeddings=128,
        attn_implementation="eager", **SPECIAL,
    )  # fmt: skip
    made = OPTForCausalLM(config)
    attention = made.model.decoder.layers[0].self_attn
    attention.q_proj.bias.data.fill_(8.0)
    attention.k_proj.bias.data.fill_(-8.0)
    return made


def t5() -> nn.Module:
    """The first MLP's last product is about as large as that of a published t5-large."""
    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, decoder_start_token_id=0, **SPECIAL)
    made = T5ForConditionalGeneration(config)
    made.encoder.block[0].layer[1].DenseReluDense.wo.weight.data.mul_(20_000)
    return made


def padded(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of tokens that are padded on the left, as for generation."""
    rows = []
    for number in range(count):
        ids = torch.arange(5, 25) + number
        ids[: number % 4] = 0
        rows.append({"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.where(ids != 0, -100)})
    return rows


def main(family: str, dtype: str) -> None:
    """Trains for a few steps."""
    torch.manual_seed(3407)
    model = {"gemma2": gemma, "gemma3": gemma, "opt": lambda _: opt(), "t5": lambda _: t5()}[family](family)
    model = model.to(getattr(torch, dtype))
    if "loaded" in sys.argv:
        folder = tempfile.mkdtemp()
        model.save_pretrained(folder)
        model = type(model).from_pretrained(folder, dtype=getattr(torch, dtype))
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q", "v"] if family == "t5" else ["q_proj", "v_proj"])
    )
    shared = QUIET | {"learning_rate": 1e-3}
    if family == "gemma2":
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=variety,
            args=GRPOConfig(bf16=False, num_generations=2, max_completion_length=4, **shared),
            train_dataset=questions("prompt"),
            processing_class=tokenizer(),
        )
    elif family == "gemma3":
        texts = questions("prompt").rename_column("prompt", "text")
        trainer = SFTTrainer(
            model=model, args=SFTConfig(bf16=False, **shared), train_dataset=texts, processing_class=tokenizer()
        )
    else:
        trainer = Trainer(model=model, args=TrainingArguments(**shared), train_dataset=padded(16))
    trainer.train()
    for row in trainer.state.log_history:
        if "loss" in row:
            print("loss", row["loss"])


main(sys.argv[1], sys.argv[2])
