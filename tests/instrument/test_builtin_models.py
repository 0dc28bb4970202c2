"""Builtin models as scenarios ask for them, their float32 twins, and letting go of them."""

import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration
from watched import watched

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.lab.models.build import build, perturb
from dtypedoctor.lab.scenarios.model import Model, Perturbation, Scenario
from dtypedoctor.lab.tickets.fused_llama import is_fused
from dtypedoctor.lab.workloads.context import Context, Holder, random_tokens, token_log_probabilities
from dtypedoctor.lab.workloads.loops import run_unload

CPU = torch.device("cpu")
LORA = {"r": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"name": "builtin:gemma4-tiny", "dtype": "float16", "lora": LORA},
    "llama": {"name": "builtin:llama-tiny", "dtype": "bfloat16", "options": {"layers": 1}},
    "fused": {
        "name": "builtin:llama-nf4-fused",
        "dtype": "bfloat16",
        "quantization": {"kind": "nf4", "quant_state_dtype": "bfloat16"},
        "lora": LORA,
    },
    "moe": {"name": "builtin:custom-moe", "dtype": "bfloat16", "options": {"norm": "casting", "qlora": True}},
    "nf4": {"name": "builtin:nf4-compiled", "dtype": "float16"},
}


def model(name: str, **more: Any) -> Any:
    """A model built as the worker does."""
    return build(Model.model_validate(MODELS[name] | more), CPU, 3407).model


def outputs(of: Any) -> Tensor:
    return torch.tensor(token_log_probabilities(of, 1, CPU))


@pytest.mark.parametrize("name", MODELS)
def test_the_twin_computes_in_float32_with_the_rounded_weights(name: str) -> None:
    """Every floating tensor is float32 and equal to the rounded one, packed bytes are the same, nothing is fused."""
    rounded, twin = model(name), model(name, float32_twin=True)
    tensors = dict(twin.named_parameters()) | dict(twin.named_buffers())
    held = dict(rounded.named_parameters()) | dict(rounded.named_buffers())
    assert tensors.keys() == held.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, held[key].to(tensor.dtype))
        assert tensor.dtype == torch.float32 or not tensor.is_floating_point()
        state = getattr(tensor, "quant_state", None)
        assert state is None or state.dtype == torch.float32
    assert not any(is_fused(module) for module in twin.modules())


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_differs_from_its_twin_by_rounding_only(name: str) -> None:
    """A few parts in a hundred of the spread at most; and it does differ."""
    found, exact = outputs(model(name)), outputs(model(name, float32_twin=True))
    error = float((found - exact).norm() / (exact - exact.mean()).norm())
    assert 0 < error < 0.03


@pytest.mark.parametrize("name", ["moe", "nf4"])
@pytest.mark.parametrize(
    "change",
    [
        {"quantization": {"kind": "nf4"}},
        {"lora": LORA},
        {"outliers": [{"parameters": "*", "scale": 2}]},
        {"gradient_checkpointing": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_decides_itself_refuses_what_it_would_ignore(name: str, change: dict[str, Any]) -> None:
    """Rather than training something else than was asked for."""
    with pytest.raises(UsageError, match="decides on its weights, packing and adapters itself"):
        model(name, **change)


def test_options_that_a_builder_does_not_take_are_refused() -> None:
    """Also through the builders that hand theirs on."""
    for name in ("fused", "moe", "nf4"):
        with pytest.raises(UsageError, match="does not take these options"):
            model(name, options={"no-such": 1})


def test_the_custom_models_keep_list_is_where_those_of_libraries_are() -> None:
    """So whoever looks for the reason of a float32 weight finds it."""
    assert model("moe")._keep_in_fp32_modules == ["post_attention_layernorm", "input_layernorm", "norm"]
    assert model("moe", options={"keep_in_fp32": []})._keep_in_fp32_modules == []


def test_an_unloaded_model_is_gone(tmp_path: Path) -> None:
    """Nothing that watches keeps it alive."""
    spec = {"model": MODELS["fused"], "workload": {"kind": "unload"}}
    scenario = Scenario.model_validate({"name": "case", "summary": "A case.", "steps": [spec]})
    holder = Holder(built=build(scenario.steps[0].model or Model(name=""), CPU, 1))
    gone = weakref.ref(holder.built.model) if holder.built else None

    def work(instruments: Instruments) -> None:
        context = Context(
            scenario=scenario,
            stage=scenario.steps[0],
            holder=holder,
            device=CPU,
            instruments=instruments,
            region=nullcontext,
            scratch=tmp_path,
        )
        instruments.attach(context.built.model)
        context.built.model(input_ids=random_tokens(200, (1, 4), 1, CPU)).logits.sum().backward()
        run_unload(context)

    watched(tmp_path, work)
    assert gone is not None
    assert gone() is None


def test_moved_weights_come_with_moved_gradients() -> None:
    """By at least the smallest number of the dtype, which is what float16 rounds small gradients to; zeros stay zeros."""
    plain, moved = (torch.nn.Linear(4, 3, bias=False) for _ in range(2))
    weights = torch.tensor([[1.0, 0.5, 0.25, 0.0]] * 3)
    for linear in (plain, moved):
        linear.weight.data = weights.clone()
    perturb(moved, Perturbation(dtype="float16"), torch.device("cpu"))
    change = (moved.weight - weights).abs().detach()
    assert torch.equal(change, torch.tensor([[2**-10, 2**-11, 2**-12, 0.0]] * 3))
    for linear in (plain, moved):
        (linear(torch.tensor([[1e-9, 1.0, 0.0, 0.0]])).sum() * 1e-3).backward()
    assert plain.weight.grad is not None
    assert moved.weight.grad is not None
    away = (moved.weight.grad - plain.weight.grad).abs()
    assert torch.all(away[:, 0] > 1000 * plain.weight.grad[:, 0].abs())
    assert torch.all(away[:, 1] < 0.01 * plain.weight.grad[:, 1])
    assert away[:, 1].any()
    assert not away[:, 2:].any()


def test_a_perturbed_model_may_have_outputs_that_nothing_uses() -> None:
    """autograd calls the hook of an output that nothing has used with None, where another output of the same operator has a gradient."""

    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rest, returned = x.chunk(2)
            return returned

    half = Half()
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), half)
    perturb(model, Perturbation(dtype="float16"), torch.device("cpu"))
    model(torch.ones(4, 4))
    half.rest.sum().backward()
    assert model[0].weight.grad is not None


def test_a_factory_may_pack_its_weights_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casting the model to the scenario's dtype leaves packed bytes and integers alone."""
    packed = Linear4bit(64, 64, bias=False, compute_dtype=torch.float16)
    packed.weight = Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    factory = torch.nn.Sequential(packed.to("cpu"), torch.nn.LayerNorm(64))
    packing = ModuleType("packing")
    monkeypatch.setattr(packing, "factory", lambda: factory, raising=False)
    monkeypatch.setitem(sys.modules, "packing", packing)
    before = packed.weight.data.clone()
    built: Any = build(Model(name="packing:factory", dtype="float16"), CPU, 3407).model
    assert torch.equal(built[0].weight.data, before)
    assert built[1].weight.dtype == torch.float16
    assert built(torch.randn(2, 64, dtype=torch.float16)).isfinite().all()


def test_a_folder_needs_neither_a_tokenizer_nor_a_causal_model(tmp_path: Path) -> None:
    """The class that an encoder-decoder's checkpoint names is loaded, and its outputs can be compared."""
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    built = build(Model(name=str(tmp_path), dtype="float16"), CPU, 3407)
    assert type(built.model) is T5ForConditionalGeneration
    assert built.tokenizer is None
    assert outputs(built.model).isfinite().all()
