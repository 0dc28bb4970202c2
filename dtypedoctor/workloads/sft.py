"""TRL's SFTTrainer on a small arithmetic data set."""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from dtypedoctor.scenario.model import Sft
from dtypedoctor.workloads.context import Context
from dtypedoctor.workloads.trl_callback import StepReporter, shared_settings


def run_sft(context: Context) -> None:
    """Trains the model for the scenario's number of steps; exceptions of the trainer are the scenario's result."""
    settings = context.stage.workload
    assert isinstance(settings, Sft)
    reporter = StepReporter(context)
    trainer = SFTTrainer(
        model=context.model,
        args=SFTConfig(max_length=settings.max_length, **shared_settings(context, settings)),
        train_dataset=sums(settings.examples),
        processing_class=context.tokenizer,
        callbacks=[reporter],
    )
    reporter.trainer = trainer
    with context.region():
        trainer.train()


def sums(count: int) -> Dataset:
    """Sums with their results, as plain text."""
    return Dataset.from_list([{"text": f"What is {i}+{i + 1}? {2 * i + 1}."} for i in range(count)])
