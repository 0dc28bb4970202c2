"""Text generation from short random prompts."""

import time
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.model import Generate
from dtypedoctor.workloads.batches import training_tokens
from dtypedoctor.workloads.context import Context

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
