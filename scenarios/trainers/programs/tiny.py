"""A tiny Llama with seeded random weights, saved as a bfloat16 checkpoint, its byte-level tokenizer, and data for TRL's trainers."""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

QUIET = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": not torch.cuda.is_available(),
    "output_dir": tempfile.mkdtemp(),
}
"""Settings of every trainer here: nothing is saved or sent."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: number for number, token in enumerate((*special, *alphabet))}
    made = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def checkpoint() -> str:
    """Saves the model in bfloat16, as published checkpoints are, and returns the folder, which is left to the system to delete."""
    torch.manual_seed(3407)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def questions(*columns: str) -> Dataset:
    """Sums, with right answers in ``chosen`` and wrong ones in ``rejected``."""
    rows = [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": "no"} for i in range(16)]
    return Dataset.from_list(rows).select_columns(list(columns))


def variety(completions: list[str], **_: Any) -> list[float]:
    """Rewards distinct characters."""
    return [len(set(text)) / 10 for text in completions]
