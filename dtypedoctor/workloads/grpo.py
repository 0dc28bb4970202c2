"""TRL's GRPOTrainer on a small arithmetic prompt set."""

from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from dtypedoctor.scenario.model import Grpo
from dtypedoctor.workloads.context import Context
from dtypedoctor.workloads.trl_callback import StepReporter, shared_settings


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
    reporter = StepReporter(context)
    trainer = GRPOTrainer(
        model=context.model,
        reward_funcs=distinct_characters,
        args=config,
        train_dataset=prompts(settings.prompts),
        processing_class=context.tokenizer,
        callbacks=[reporter],
    )
    reporter.trainer = trainer
    with context.region():
        trainer.train()


def prompts(count: int) -> Dataset:
    """Questions with one user message each, so that the tokenizer's chat template is exercised."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {i}+{i + 1}?"}]} for i in range(count)])


def distinct_characters(completions: list[Any], **_: Any) -> list[float]:
    """Rewards variety: the number of distinct characters of a completion, over ten."""
    texts = (c if isinstance(c, str) else c[0]["content"] for c in completions)
    return [len(set(text)) / 10 for text in texts]
