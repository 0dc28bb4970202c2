"""The fixed probe batch, by which the policies of two runs are compared."""

from math import isfinite

import torch
from torch import Tensor, nn

PROBE_SEQUENCES = 2
PROBE_TOKENS = 24
FIRST_ORDINARY = 4
"""Smaller ids are special tokens of the builtin tokenizer."""


def vocabulary_of(model: nn.Module) -> int | None:
    """Number of tokens that ``model`` knows; None for a model that does not say."""
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None) or getattr(getattr(config, "text_config", None), "vocab_size", None)
    return int(size) if isinstance(size, int) else None


def random_tokens(vocabulary: int, shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """Ordinary token ids of ``shape`` from a generator of their own, the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(FIRST_ORDINARY, vocabulary - 1), vocabulary, shape, generator=generator).to(device)


def token_log_probabilities(model: nn.Module, seed: int, device: torch.device) -> list[float | None]:
    """log p(token | tokens before it) for every token of the probe batch but the first of each sequence, in float32.

    The probe batch holds (2, 24) token ids; an encoder-decoder reads them and is asked to repeat them. The model is put into evaluation mode for the pass and back afterwards; an
    element that is not finite is None.
    """
    vocabulary = vocabulary_of(model)
    assert vocabulary is not None  # the caller has looked
    tokens = random_tokens(vocabulary, (PROBE_SEQUENCES, PROBE_TOKENS), seed, device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens, **_decoded(model, tokens)).logits[:, :-1].float()
    finally:
        model.train(training)
    values = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).flatten().tolist()
    return [value if isfinite(value) else None for value in values]


def _decoded(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """What a decoder reads beside the encoder; nothing for a model without one."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return {"decoder_input_ids": tokens} if both else {}
