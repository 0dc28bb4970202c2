"""Random batches for the workloads without a trainer, and the loss on them."""

import torch
from torch import Tensor, nn

from dtypedoctor.errors import UsageError
from dtypedoctor.workloads.context import Context
from dtypedoctor.workloads.probe import random_tokens, vocabulary_of


def training_tokens(context: Context, shape: tuple[int, int], number: int) -> Tensor:
    """Token ids of ``shape`` (batch, tokens): batch ``number`` (from 1) of the scenario's seed.

    Raises:
        UsageError: the model does not say how many tokens it knows.
    """
    model = context.built.model
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        raise UsageError(
            f"{type(model).__name__} has no config.vocab_size, so there are no tokens to give it",
            "Give it one, or use the script workload.",
        )
    return random_tokens(vocabulary, shape, context.scenario.seed + number, context.device)


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
