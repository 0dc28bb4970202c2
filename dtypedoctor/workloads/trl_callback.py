"""Carries a trainer's own numbers into the trace."""

import time
from typing import Any

from transformers import TrainerCallback

from dtypedoctor.workloads.context import Context

REPORTED = ("loss", "grad_norm", "reward", "kl", "entropy")


class StepReporter(TrainerCallback):
    """Records loss, grad_norm, reward and time of every step, and probes the policy after it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._began = 0.0
        self._seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock of a step."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the clock and probes."""
        self._seconds = time.perf_counter() - self._began
        self._context.steps_completed = state.global_step
        self._context.probe(kwargs["model"], state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Records the numbers that the trainer logs for a step."""
        if not logs or "loss" not in logs:
            return
        values = {name: float(logs[name]) for name in REPORTED if name in logs}
        self._context.metric(state.global_step, values | {"step_time": self._seconds})
