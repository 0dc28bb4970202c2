"""The workloads with TRL's trainers: SFTTrainer and GRPOTrainer on small arithmetic data sets, their numbers written into the trace."""

import time
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from dtypedoctor.lab.scenarios.model import Grpo, Sft
from dtypedoctor.lab.workloads.context import Context

REPORTED = ("loss", "grad_norm", "reward", "kl", "entropy")


def shared_settings(context: Context, settings: Grpo | Sft) -> dict[str, Any]:
    """Arguments that every TRL configuration takes: nothing is saved, downloaded or sent anywhere."""
    return {
        "output_dir": str(context.scratch),
        "per_device_train_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "max_steps": settings.steps,
        "learning_rate": settings.learning_rate,
        "optim": "adamw_torch" if settings.optimizer == "adamw" else "sgd",
        "seed": context.scenario.seed,
        "use_cpu": context.device.type == "cpu",
        "fp16": settings.mixed_precision == "fp16",
        "bf16": settings.mixed_precision == "bf16",
        "gradient_checkpointing": False,  # the model has been built with or without it
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


class StepReporter(TrainerCallback):
    """Records loss, grad_norm, reward and time of every step, and probes the policy after it.

    Attributes:
        trainer: the trainer that it is a callback of, once that is there.
    """

    def __init__(self, context: Context) -> None:
        self.trainer: Any = None
        self._context = context
        self._began = 0.0
        self._seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """On several GPUs the trainer calls the model through a wrapper: it goes by the model's name."""
        wrapper, model = self.trainer.model_wrapped, self._context.model
        if wrapper is not model:
            self._context.instruments.name_as(wrapper, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock of a step."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the clock and probes."""
        self._seconds = time.perf_counter() - self._began
        self._context.steps_completed = state.global_step
        self._context.probe(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Records the numbers that the trainer logs for a step."""
        if not logs or "loss" not in logs:
            return
        values = {name: float(logs[name]) for name in REPORTED if name in logs}
        self._context.metric(state.global_step, values | {"step_time": self._seconds})


def run_sft(context: Context) -> None:
    """Trains the model for the scenario's number of steps; exceptions of the trainer are the scenario's result."""
    settings = context.stage.workload
    assert isinstance(settings, Sft)
    config = SFTConfig(max_length=settings.max_length, **shared_settings(context, settings))
    _train(context, SFTTrainer, args=config, train_dataset=sums(settings.examples))


def _train(context: Context, trainer_class: Any, **arguments: Any) -> None:
    reporter = StepReporter(context)
    reporter.trainer = trainer_class(
        model=context.model, processing_class=context.tokenizer, callbacks=[reporter], **arguments
    )
    with context.region():
        reporter.trainer.train()


def sums(count: int) -> Dataset:
    """Sums with their results, as plain text."""
    return Dataset.from_list([{"text": f"What is {i}+{i + 1}? {2 * i + 1}."} for i in range(count)])


def run_grpo(context: Context) -> None:
    """Trains the policy for the scenario's number of steps; exceptions of the trainer are the scenario's result."""
    settings = context.stage.workload
    assert isinstance(settings, Grpo)
    config = GRPOConfig(
        num_generations=settings.generations,
        max_completion_length=settings.new_tokens,
        beta=settings.beta,
        **shared_settings(context, settings),
    )
    data = prompts(settings.prompts)
    _train(context, GRPOTrainer, args=config, train_dataset=data, reward_funcs=distinct_characters)


def prompts(count: int) -> Dataset:
    """Questions with one user message each, so that the tokenizer's chat template is exercised."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {i}+{i + 1}?"}]} for i in range(count)])


def distinct_characters(completions: list[Any], **_: Any) -> list[float]:
    """Rewards variety: the number of distinct characters of a completion, over ten."""
    texts = (c if isinstance(c, str) else c[0]["content"] for c in completions)
    return [len(set(text)) / 10 for text in texts]
