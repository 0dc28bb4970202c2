"""Tiny models with seeded random weights, and their byte-level tokenizer; nothing is downloaded.

Their builders take the scenario's ``options`` and return a float32 model on the CPU; everything else (outliers, dtype,
quantization, adapters) is the same for all of them and happens in ``build.py``.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


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


SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")

SPECIAL_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
"""Their ids, as configurations of models name them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte (256) after the special tokens pad=0, eos=1, bos=2, unk=3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


VOCABULARY_SIZE = len(SPECIAL) + 256
