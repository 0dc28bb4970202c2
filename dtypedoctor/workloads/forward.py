"""Forward passes on random token ids, with their gradients if asked for."""

import time

import torch
from torch.nn.utils import get_total_norm

from dtypedoctor.scenario.model import Forward
from dtypedoctor.workloads.batches import language_model_loss, training_tokens, value_of
from dtypedoctor.workloads.context import Context


def run_forward(context: Context) -> None:
    """Calls the model as often as the scenario says; without ``backward`` in evaluation mode and without gradients."""
    settings = context.stage.workload
    assert isinstance(settings, Forward)
    context.built.model.train(settings.backward)
    for step in range(1, settings.steps + 1):
        context.begin_step()
        tokens = training_tokens(context, (settings.batch_size, settings.sequence_length), step)
        began = time.perf_counter()
        with torch.set_grad_enabled(settings.backward):
            with context.region():
                loss = language_model_loss(context.model, tokens)
            values = {"loss": loss.item()}
            if settings.backward:
                loss.backward()
                values["grad_norm"] = _take_gradient_norm(context)
        values["step_time"] = time.perf_counter() - began
        context.steps_completed = step
        context.metric(step, values)
        with context.region():
            context.probe(step)


def _take_gradient_norm(context: Context) -> float:
    """The norm over all gradients, which are removed afterwards."""
    parameters = [p for p in context.built.model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    for parameter in parameters:
        parameter.grad = None
    return value_of(norm)
