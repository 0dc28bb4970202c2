"""Tiny models from real library code with seeded random weights; nothing is downloaded.

Each builder takes the scenario's ``options`` and returns a float32 model on the CPU; everything else (outliers, dtype,
quantisation, adapters) is the same for all of them and happens in ``build.py``.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, LlamaConfig, LlamaForCausalLM

from dtypedoctor.models.tokenizer import VOCABULARY_SIZE

Builder = Callable[..., nn.Module]

_SPECIAL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def gemma4_tiny(*, layers: int = 2, hidden: int = 64, intermediate: int = 128) -> nn.Module:
    """Gemma-4's text model with full attention, 2 heads of 16 dimensions and no per-layer inputs."""
    config = Gemma4TextConfig(
        vocab_size=VOCABULARY_SIZE,
        vocab_size_per_layer_input=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        layer_types=["full_attention"] * layers,
        max_position_embeddings=512,
        **_SPECIAL_TOKENS,
    )
    return Gemma4ForCausalLM(config)


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
        **_SPECIAL_TOKENS,
    )
    return LlamaForCausalLM(config)


BUILTINS: dict[str, Builder] = {
    "gemma4-tiny": gemma4_tiny,
    "llama-tiny": llama_tiny,
}
"""Builders by the name that stands after ``builtin:``."""


def builder_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The options as keyword arguments; YAML keys with dashes become Python names."""
    return {key.replace("-", "_"): value for key, value in options.items()}
