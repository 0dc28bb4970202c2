"""TRL's real trainers on the fused NF4 Llama: what is healthy, and where each disagreement of dtypes ends a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from fused_llama import LINEARS, cause, corrected, nf4_llama, region
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from dtypedoctor.models.builtin import byte_tokenizer
from dtypedoctor.tickets.fused_llama import dequantize

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True)
def fresh_buffers() -> None:
    """No buffer is left from another test."""
    dequantize.BUFFERS.clear()


def grpo(model: Any, folder: Path) -> Any:
    """A GRPO trainer whose reward prefers every second completion, so that the advantages are never all zero."""
    config = GRPOConfig(output_dir=str(folder), num_generations=2, max_completion_length=4, beta=0.0, **COMMON)
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(index % 2) for index in range(len(completions))],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(8)]),
        processing_class=byte_tokenizer(),
    )


def sft(model: Any, folder: Path) -> Any:
    """A supervised trainer on a few sums."""
    config = SFTConfig(output_dir=str(folder), max_length=16, **COMMON)
    data = Dataset.from_list([{"text": f"{i}+{i}={2 * i}"} for i in range(8)])
    return SFTTrainer(model=model, args=config, train_dataset=data, processing_class=byte_tokenizer())


@pytest.mark.parametrize("trainer", [grpo, sft])
def test_two_steps_in_bfloat16_are_healthy(trainer: Any, tmp_path: Path) -> None:
    """Loss and gradient norm are finite in both steps, and the adapters move."""
    model = nf4_llama("bf16", "bf16")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    running = trainer(model, tmp_path)
    running.train()
    logged = [entry for entry in running.state.log_history if "grad_norm" in entry]
    assert len(logged) == 2
    assert all(torch.isfinite(torch.tensor([entry["loss"], entry["grad_norm"]])).all() for entry in logged)
    assert logged[-1]["grad_norm"] > 0
    moved = [not torch.equal(p.detach().float(), before[n].float()) for n, p in model.named_parameters() if n in before]
    assert all(moved)


FAILURES = [
    pytest.param("bf16", "f16", LINEARS, True, "f16", "addmm_ Half BFloat16", "accumulate", "generate", id="a"),
    pytest.param("bf16", "f16", LINEARS, True, "off", "mm BFloat16 Half", "lora_matmul", "generate", id="b"),
    pytest.param("bf16", "f16", LINEARS, False, "bf16", "addmm_ BFloat16 Half", "accumulate", "backward", id="c"),
    pytest.param("f32", "f16", ["down_proj"], False, "f16", "addmm_ Float Half", "accumulate", "backward", id="d"),
    pytest.param("bf16", "f16", LINEARS, True, "bf16", "mm BFloat16 Half", "decode_linear", "generate", id="e"),
]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("dtype", "state", "targets", "decode_path", "autocast", "error", "step", "phase"), FAILURES)
def test_a_disagreement_ends_grpo_at_its_own_place(
    dtype: str,
    state: str,
    targets: list[str],
    decode_path: bool,
    autocast: str,
    error: str,
    step: str,
    phase: str,
    tmp_path: Path,
) -> None:
    """The op family, the kernel step and the phase tell the five variants apart."""
    trainer = grpo(nf4_llama(dtype, state, targets, decode_path), tmp_path)
    with region(autocast), pytest.raises(RuntimeError) as raised:
        trainer.train()
    assert cause(raised.value) == error
    names = [entry.name for entry in raised.traceback]
    assert names[-1] == step
    assert phase in names


CURES = [
    pytest.param("off", ("quant-state-dtype",), id="b-quant-state"),
    pytest.param("off", ("cast-after-dequantize", "backward-autocast-off", "decode-in-input-dtype"), id="b-casts"),
    pytest.param("bf16", ("quant-state-dtype",), id="c-e-quant-state"),
]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("autocast", "ids"), CURES)
def test_a_cured_grpo_run_finishes(autocast: str, ids: tuple[str, ...], tmp_path: Path) -> None:
    """A quant_state of another dtype than the activations is cured at its source, or by casts in all three places."""
    model = nf4_llama("bf16", "f16")
    with corrected(model, *ids) as installed, region(autocast):
        trainer = grpo(model, tmp_path)
        trainer.train()
        assert trainer.state.global_step == 2
        assert all(correction.counters.hits for correction in installed)
