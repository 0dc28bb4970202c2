"""Tiny models with seeded random weights; nothing is downloaded.

Most are real library code: their builders take the scenario's ``options`` and return a float32 model on the CPU, and
everything else (outliers, dtype, quantisation, adapters) is the same for all of them and happens in ``build.py``. The
others stand for custom models, which decide on their dtypes, packing and adapters themselves.
"""

from typing import Any

import torch
from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, LlamaConfig, LlamaForCausalLM

from dtypedoctor.models.custom_moe import CustomMoeConfig, build_custom_moe
from dtypedoctor.models.llama_nf4 import fuse
from dtypedoctor.models.nf4_compiled import Nf4CompiledConfig, build_nf4_compiled
from dtypedoctor.models.tokenizer import VOCABULARY_SIZE

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


def llama_nf4_fused(*, decode_path: bool = True, **sizes: int) -> nn.Module:
    """The Llama of :func:`llama_tiny` whose projections run through the fused LoRA functions, once packed and adapted."""
    return fuse(llama_tiny(**sizes), decode_path=decode_path)


def custom_moe(*, dtype: torch.dtype, seed: int, **options: Any) -> nn.Module:
    """The custom decoder; see :class:`CustomMoeConfig` for the options."""
    config = CustomMoeConfig(dtype=dtype, seed=seed, **options)
    model: Any = build_custom_moe(config)
    model._keep_in_fp32_modules = list(config.keep_in_fp32)  # where transformers' own models carry theirs
    return model


def nf4_compiled(*, dtype: torch.dtype, seed: int, **options: Any) -> nn.Module:
    """The NF4 decoder that is made to be compiled; see :class:`Nf4CompiledConfig` for the options."""
    return build_nf4_compiled(Nf4CompiledConfig(dtype=dtype, seed=seed, **options))


def builder_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The options as keyword arguments; YAML keys with dashes become Python names."""
    return {key.replace("-", "_"): value for key, value in options.items()}
