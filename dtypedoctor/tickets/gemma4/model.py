"""A tiny Gemma-4, from transformers' own code."""

from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from dtypedoctor.models.builtin import SPECIAL_TOKENS, VOCABULARY_SIZE


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
        **SPECIAL_TOKENS,
    )
    return Gemma4ForCausalLM(config)
