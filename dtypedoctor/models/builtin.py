"""Tiny models with seeded random weights; nothing is downloaded.

Their builders take the scenario's ``options`` and return a float32 model on the CPU; everything else (outliers, dtype,
quantisation, adapters) is the same for all of them and happens in ``build.py``.
"""

from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dtypedoctor.models.tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE


def llama_tiny(*, layers: int = 2, hidden: int = 64, intermediate: int = 128) -> nn.Module:
    """A Llama with 4 heads of 16 dimensions."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        **SPECIAL_TOKENS,
    )
    return LlamaForCausalLM(config)


def builder_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The options as keyword arguments; YAML keys with dashes become Python names."""
    return {key.replace("-", "_"): value for key, value in options.items()}
