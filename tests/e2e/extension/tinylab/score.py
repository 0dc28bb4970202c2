"""A workload: scores random sequences, without gradients."""

import torch

from dtypedoctor.lab.workloads.context import Context, language_model_loss, training_tokens


def run(context: Context) -> None:
    """As many batches as the scenario says, of `length` tokens."""
    spec = context.stage.workload
    length = spec.options.get("length", 8)
    context.built.model.eval()
    for step in range(1, spec.steps + 1):
        context.begin_step()
        tokens = training_tokens(context, (2, length), step)
        with torch.no_grad(), context.region():
            loss = language_model_loss(context.model, tokens)
        context.steps_completed = step
        context.metric(step, {"loss": loss.item()})
        context.probe(step)
