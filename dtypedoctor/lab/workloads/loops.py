"""The workloads that need torch only, on random token ids: forward passes, a training loop, generation, unloading the model."""

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.model import Forward, Generate, Train
from dtypedoctor.lab.workloads.context import Context, language_model_loss, training_tokens


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
                # the norm over all gradients, which are removed afterwards
                parameters = [p for p in context.built.model.parameters() if p.grad is not None]
                norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
                for parameter in parameters:
                    parameter.grad = None
                values["grad_norm"] = float(norm.item())
        values["step_time"] = time.perf_counter() - began
        context.steps_completed = step
        context.metric(step, values)
        # A single pass leaves the outputs as they were before it, and a probe of a bisection is short
        if context.look_steps != 0 or settings.steps > 1:
            with context.region():
                context.probe(step)


def run_train(context: Context) -> None:
    """Trains for the scenario's number of optimizer steps, with autocast around each forward or around all of it."""
    settings = context.stage.workload
    assert isinstance(settings, Train)
    around_all = settings.autocast_scope == "loop"
    with context.region() if around_all else nullcontext():
        loop = _Loop(context, settings)
        for step in range(1, settings.steps + 1):
            began = time.perf_counter()
            values = loop.step(step)
            context.steps_completed = step
            context.metric(step, values | {"step_time": time.perf_counter() - began})
            with context.region():
                context.probe(step)


class _Loop:
    def __init__(self, context: Context, settings: Train) -> None:
        self._context = context
        self._settings = settings
        self._model = context.model
        self._parameters = [p for p in context.built.model.parameters() if p.requires_grad]
        self._optimizer = _optimizer(settings, self._parameters)
        self._scaler = torch.amp.GradScaler(context.device.type, enabled=context.stage.grad_scaler)
        context.built.model.train()

    def step(self, number: int) -> dict[str, float]:
        """One optimizer step: loss (mean over the micro-steps), gradient norm before clipping, and the scale if any."""
        losses = [self._backward(tokens) for tokens in self._batches(number)]
        self._scaler.unscale_(self._optimizer)
        limit = self._settings.max_grad_norm
        norm = clip_grad_norm_(self._parameters, inf if limit is None else limit)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        values = {"loss": sum(losses) / len(losses), "grad_norm": float(norm.item())}
        return values | ({"scale": self._scaler.get_scale()} if self._scaler.is_enabled() else {})

    def _batches(self, number: int) -> Iterator[torch.Tensor]:
        settings = self._settings
        shape = (settings.batch_size, settings.sequence_length)
        for micro in range(settings.gradient_accumulation):
            yield training_tokens(self._context, shape, (number - 1) * settings.gradient_accumulation + micro + 1)

    def _backward(self, tokens: torch.Tensor) -> float:
        with self._region():
            loss = language_model_loss(self._model, tokens)
        self._scaler.scale(loss / self._settings.gradient_accumulation).backward()
        return loss.item()

    def _region(self) -> AbstractContextManager[Any]:
        """Around the forward pass only, unless the whole loop is inside one already."""
        return self._context.region() if self._settings.autocast_scope == "forward" else nullcontext()


def _optimizer(settings: Train, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=settings.learning_rate)
    return torch.optim.SGD(parameters, lr=settings.learning_rate)


PROMPT_TOKENS = 8


def run_generate(context: Context) -> None:
    """Calls ``generate`` as often as the scenario says; every call yields its full number of new tokens.

    Raises:
        UsageError: the model cannot generate.
    """
    settings = context.stage.workload
    assert isinstance(settings, Generate)
    model: Any = context.model
    if not callable(getattr(model, "generate", None)):
        raise UsageError(f"{type(context.built.model).__name__} has no generate", "Use the forward workload.")
    model.eval()
    for step in range(1, settings.steps + 1):
        context.begin_step()
        prompt = training_tokens(context, (settings.batch_size, PROMPT_TOKENS), step)
        began = time.perf_counter()
        with context.region():
            tokens = model.generate(
                prompt,
                attention_mask=prompt.new_ones(prompt.shape),
                max_new_tokens=settings.new_tokens,
                min_new_tokens=settings.new_tokens,
                do_sample=settings.sample,
            )
        seconds = time.perf_counter() - began
        context.steps_completed = step
        context.metric(step, {"step_time": seconds, "new_tokens": float(tokens.shape[1] - PROMPT_TOKENS)})
        with context.region():
            context.probe(step)


def run_unload(context: Context) -> None:
    """``del model``, garbage collection, and the emptying of the CUDA allocator's cache."""
    context.instruments.detach(context.built.model)
    context.holder.built = None
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
