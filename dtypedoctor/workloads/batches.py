"""Random batches for the workloads without a trainer, and the loss on them."""

import torch
from torch import Tensor, nn

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.statistics import is_spread
from dtypedoctor.workloads.context import Context
from dtypedoctor.workloads.probe import random_tokens, vocabulary_of

RANK_STRIDE = 1_000_003
"""Distance of the seeds of two ranks: more than a run has batches."""


def training_tokens(context: Context, shape: tuple[int, int], number: int) -> Tensor:
    """Token ids of ``shape`` (batch, tokens): batch ``number`` (from 1) of the scenario's seed, for each rank another.

    Raises:
        UsageError: the model does not say how many tokens it knows.
    """
    model = context.built.model
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        raise UsageError(
            f"{type(model).__name__} has no config.vocab_size, so there are no tokens to give it",
            "Wrap it in a factory (package.module:factory) with config.vocab_size and a forward of input_ids and labels, or run a script.",
        )
    seed = context.scenario.seed + number + RANK_STRIDE * context.rank
    return random_tokens(vocabulary, shape, seed, context.device)


def value_of(norm: Tensor) -> float:
    """A norm over gradients, of which after FSDP each rank holds a part only; every rank has to ask for it."""
    whole = norm.full_tensor() if is_spread(norm) else norm  # type: ignore[attr-defined]  # that of a DTensor
    return float(whole.item())


def language_model_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy of predicting ``tokens`` (batch, tokens); a scalar.

    Raises:
        UsageError: the model returns none.
    """
    loss = model(input_ids=tokens, labels=tokens).loss
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"{type(model).__name__} returns no loss for its labels",
            "Its forward must take input_ids and labels and return an object with `loss` and `logits`.",
        )
    return loss
