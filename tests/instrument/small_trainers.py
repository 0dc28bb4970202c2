"""transformers' Trainer on a tiny model, and a way for it to fail."""

from pathlib import Path
from typing import Any

from inprocess_parts import tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments

QUIET = {
    "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True, "save_strategy": "no", "report_to": [],
    "disable_tqdm": True, "logging_steps": 1, "seed": 1,
}  # fmt: skip


def rows(count: int) -> list[dict[str, list[int]]]:
    """Token sequences and their labels."""
    return [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(4, 4 + count)]


def plain(folder: Path, *callbacks: TrainerCallback, model: Any = None, **settings: Any) -> Trainer:
    """transformers' Trainer with three steps to do."""
    arguments = TrainingArguments(output_dir=str(folder), **{"max_steps": 3} | QUIET | settings)
    return Trainer(
        model=model if model is not None else tiny_llama(),
        args=arguments,
        train_dataset=rows(8),
        eval_dataset=rows(2),
        callbacks=list(callbacks),
    )


class Raises(TrainerCallback):
    """Ends the second step with an exception."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise ConnectionError("the logger is gone")
