"""TRL's GRPOTrainer on a small arithmetic prompt set."""

from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from dtypedoctor.scenario.model import Grpo
from dtypedoctor.workloads.context import Context
from dtypedoctor.workloads.trl_callback import StepReporter


def run_grpo(context: Context) -> None:
    """Trains the policy for the scenario's number of steps; exceptions of the trainer are the scenario's result."""
    settings = context.stage.workload
    assert isinstance(settings, Grpo)
    config = GRPOConfig(
        output_dir=str(context.scratch),
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        num_generations=settings.generations,
        max_completion_length=settings.new_tokens,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        optim="adamw_torch" if settings.optimizer == "adamw" else "sgd",
        beta=settings.beta,
        seed=context.scenario.seed,
        use_cpu=context.device.type == "cpu",
        fp16=settings.mixed_precision == "fp16",
        bf16=settings.mixed_precision == "bf16",
        gradient_checkpointing=False,  # the model has been built with or without it
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=context.built.model,
        reward_funcs=distinct_characters,
        args=config,
        train_dataset=prompts(settings.prompts),
        processing_class=context.built.tokenizer,
        callbacks=[StepReporter(context)],
    )
    with context.region():
        trainer.train()


def prompts(count: int) -> Dataset:
    """Questions with one user message each, so that the tokenizer's chat template is exercised."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {i}+{i + 1}?"}]} for i in range(count)])


def distinct_characters(completions: list[Any], **_: Any) -> list[float]:
    """Rewards variety: the number of distinct characters of a completion, over ten."""
    texts = (c if isinstance(c, str) else c[0]["content"] for c in completions)
    return [len(set(text)) / 10 for text in texts]
