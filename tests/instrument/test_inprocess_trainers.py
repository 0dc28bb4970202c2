"""``DtypeDoctorCallback`` and ``watch`` around real trainers: transformers' Trainer, TRL's SFTTrainer and GRPOTrainer."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from inprocess_parts import OWN_CODE, phases_in, report_in, tiny_llama, trace_in
from patience import PATIENCE
from small_trainers import QUIET, Raises, plain
from torch import Tensor
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import dtypedoctor
from dtypedoctor.lab.models.builtin import byte_tokenizer
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_md import render_markdown
from dtypedoctor.trace.events import Metric, Raised

pytestmark = pytest.mark.slow


def sft(folder: Path, *callbacks: TrainerCallback) -> Trainer:
    return SFTTrainer(
        model=tiny_llama(),
        args=SFTConfig(output_dir=str(folder), max_steps=2, max_length=16, bf16=False, **QUIET),
        train_dataset=Dataset.from_list([{"text": f"{i} and {i + 1}"} for i in range(4)]),
        processing_class=byte_tokenizer(),
        callbacks=list(callbacks),
    )


def grpo(folder: Path, *callbacks: TrainerCallback) -> Trainer:
    """TRL's GRPO trainer, which generates in every step."""
    return GRPOTrainer(
        model=tiny_llama(),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder), max_steps=2, num_generations=2, max_completion_length=4, bf16=False, **QUIET
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{i}?"} for i in range(4)]),
        processing_class=byte_tokenizer(),
        callbacks=list(callbacks),
    )


def losses(trainer: Trainer) -> list[float]:
    """What the trainer itself has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: Trainer) -> Iterator[Tensor]:
    return (parameter.detach() for parameter in trainer.model.parameters())


SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "accumulating": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluating": {"eval_strategy": "steps", "eval_steps": 1},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_a_training_is_the_same_with_the_callback(settings: dict[str, Any], tmp_path: Path) -> None:
    """Losses and weights are bitwise equal; the report counts the trainer's steps and finds nothing."""
    alone = plain(tmp_path / "alone", **settings)
    alone.train()
    callback = dtypedoctor.DtypeDoctorCallback(tmp_path / "run")
    trainer = plain(tmp_path / "watched", callback, **settings)
    trainer.train()
    assert losses(trainer) == losses(alone)
    assert all(torch.equal(a, b) for a, b in zip(weights(trainer), weights(alone), strict=True))
    report = report_in(tmp_path / "run")
    assert report["status"] == "healthy", report["headline"]
    assert "3 optimizer steps" in report["headline"]
    assert callback.report is not None
    metrics = trace_in(tmp_path / "run").all(Metric)
    assert [metric.step for metric in metrics] == [1, 2, 3]
    recomputes = "gradient_checkpointing" in settings
    assert phases_in(tmp_path / "run") == {"forward", "backward", "optimizer"} | (
        {"recompute"} if recomputes else set()
    )


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("make", "phases"), [(sft, {"forward", "backward"}), (grpo, {"generate", "backward"})])
def test_trainers_of_trl_are_watched(make: Callable[..., Trainer], phases: set[str], tmp_path: Path) -> None:
    """Two steps each, healthy, in the phases that the trainer goes through; the losses are those without the callback."""
    alone = make(tmp_path / "alone")
    alone.train()
    trainer = make(tmp_path / "watched", dtypedoctor.DtypeDoctorCallback(tmp_path / "run"))
    trainer.train()
    assert losses(trainer) == losses(alone)
    report = report_in(tmp_path / "run")
    assert report["status"] == "healthy", report["headline"]
    assert "2 optimizer steps" in report["headline"]
    assert phases <= phases_in(tmp_path / "run")


@pytest.mark.release
def test_watch_around_a_trainer_says_what_the_callback_says(tmp_path: Path) -> None:
    """Training and the evaluation after it are in one report."""
    trainer = plain(tmp_path / "trainer")
    with dtypedoctor.watch(trainer.model, out=tmp_path / "run"):
        trainer.train()
        trainer.evaluate()
    report = report_in(tmp_path / "run")
    assert report["status"] == "healthy"
    assert "3 optimizer steps" in report["headline"]


def overflowing_llama() -> Any:
    """In float16 the first MLP leaves the range."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(2e4)
        model.model.layers[0].mlp.up_proj.weight.mul_(2e4)
    return model.half()


def test_the_callback_as_the_readme_adds_it_names_the_operator(tmp_path: Path) -> None:
    """What failed is replayed without an option: the finding is proven, with its operator, and the call is kept."""
    plain(tmp_path, dtypedoctor.DtypeDoctorCallback(tmp_path / "run"), model=overflowing_llama(), max_steps=1).train()
    finding = report_in(tmp_path / "run")["findings"][0]
    assert (finding["op"], finding["confidence"]) == ("aten.mul.Tensor", "proven")
    assert (tmp_path / "run" / "capsule").is_dir()


@pytest.mark.release
def test_one_callback_serves_several_trainings_and_an_end_that_was_not_told(tmp_path: Path) -> None:
    """Each training has a directory of its own; the one that raised is written up when the next one begins."""
    callback = dtypedoctor.DtypeDoctorCallback(tmp_path / "run")
    with pytest.raises(ConnectionError, match="the logger is gone"):
        plain(tmp_path / "first", callback, Raises()).train()
    assert callback.report is None
    plain(tmp_path / "second", callback).train()
    first, second = report_in(tmp_path / "run"), report_in(tmp_path / "run-2")
    assert "2 optimizer steps" in first["headline"]
    assert any("training did not complete" in line for line in first["coverage"])
    assert "3 optimizer steps" in second["headline"]
    assert not any("did not complete" in line for line in second["coverage"])


@pytest.mark.release
def test_an_exception_that_is_told_is_in_the_report(tmp_path: Path) -> None:
    """`finish(error)` writes the training up at once, and again does nothing."""
    callback = dtypedoctor.DtypeDoctorCallback(tmp_path / "run")
    with pytest.raises(ConnectionError) as caught:
        plain(tmp_path / "trainer", callback, Raises()).train()
    callback.finish(caught.value)
    callback.finish()
    report = report_in(tmp_path / "run")
    assert report["status"] == "error"
    assert "ConnectionError" in report["headline"]
    raised = trace_in(tmp_path / "run").last(Raised)
    assert raised is not None
    assert not any(f"{OWN_CODE}instrument" in frame for frame in raised.frames)


@pytest.mark.release
def test_a_training_that_is_resumed_is_watched_from_there(tmp_path: Path) -> None:
    """The report of the second training holds the steps that it did itself."""
    plain(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = plain(tmp_path, dtypedoctor.DtypeDoctorCallback(tmp_path / "run"), max_steps=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 3
    report = report_in(tmp_path / "run")
    assert report["status"] == "healthy", report["findings"]
    assert "1 optimizer step" in report["headline"]


@pytest.mark.release
def test_a_training_inside_a_watched_block_is_part_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The callback gives way and says so; training goes on."""
    callback = dtypedoctor.DtypeDoctorCallback(tmp_path / "inner")
    with dtypedoctor.watch(out=tmp_path / "outer"):
        plain(tmp_path / "trainer", callback).train()
    assert "already recorded in" in capsys.readouterr().err
    assert not (tmp_path / "inner").exists()
    assert "3 optimizer steps" in report_in(tmp_path / "outer")["headline"]


DIES = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from small_trainers import Raises, plain
import dtypedoctor
plain(Path("trainer"), dtypedoctor.DtypeDoctorCallback("run"), Raises()).train()
"""


def test_a_training_that_ends_the_program_is_written_up_when_the_process_ends(tmp_path: Path) -> None:
    """With the exception that Python has shown; the program's own exit status and traceback are what they were."""
    source = DIES.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert "ConnectionError: the logger is gone" in done.stderr
    report = report_in(tmp_path / "run")
    assert report["status"] == "error"
    assert "ConnectionError" in report["headline"]
    assert report["findings"] == []
    assert len(trace_in(tmp_path / "run").all(Metric)) == 2


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("filters", [True, False])
def test_a_loss_that_the_trainer_logs_as_0_is_shown_as_nan(tmp_path: Path, filters: bool) -> None:
    """The report shows what was computed, and what the log leaves out."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    watch = dtypedoctor.DtypeDoctorCallback(out=tmp_path / "run")
    trainer = plain(tmp_path, watch, model=model, logging_nan_inf_filter=filters)
    trainer.train()
    computed = watch.report.before
    assert computed.loss == (None, None, None)
    assert set(computed.nonfinite["loss"].values()) <= {"nan", "inf"}
    page = run_document(watch.report)
    table = render_markdown(page)
    assert "NaN" in table or "inf → " in table
    assert (losses(trainer)[0] == 0) is filters
    assert ("Trainer logs 0 in place of NaN or inf (logging_nan_inf_filter=True): 3 of 3 losses" in table) is filters
