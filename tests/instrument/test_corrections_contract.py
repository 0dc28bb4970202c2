"""What every correction has to show: float32's values forward and backward, and that nothing of it stays when undone."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from correction_rows import ROWS, Subject, gemma, rotation_of
from fused_llama import ROUNDING, corrected, nf4_llama, normal
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtypedoctor.corrections.contract import TargetMismatchError, put_in
from dtypedoctor.lab.models.builtin import llama_tiny
from dtypedoctor.lab.tickets import dequantize, fused_lora, nf4_ctypes
from dtypedoctor.lab.tickets.custom_moe import CustomMoeConfig, build_custom_moe
from dtypedoctor.plugins import Correction, registered

pytestmark = pytest.mark.slow


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


def kernels_in_force() -> dict[str, Any]:
    """The functions of the kernel modules that corrections replace, and who is told of launches."""
    found: dict[str, Any] = {"launches": list(nf4_ctypes.launches)}
    for kernel in (dequantize, fused_lora, nf4_ctypes):
        found |= {f"{kernel.__name__}.{name}": f for name, f in vars(kernel).items() if inspect.isfunction(f)}
    return found


def standing(model: nn.Module) -> dict[str, Any]:
    """All that a correction can change: code, forwards of classes and instances, dtypes and values of what is stored."""
    found = kernels_in_force()
    for name, module in model.named_modules():
        found[f"{name}: class"] = type(module).forward
        found[f"{name}: code"] = inspect.unwrap(module.forward).__code__
        found[f"{name}: own forward"] = vars(module).get("forward")
        found[f"{name}: compute dtype"] = vars(module).get("compute_dtype")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name}: dtype"] = tensor.dtype
        found[f"{name}: state"] = getattr(getattr(tensor, "quant_state", None), "dtype", None)
        found[f"{name}: values"] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def same(first: tuple[Tensor, ...] | str, second: tuple[Tensor, ...] | str) -> bool:
    """Whether two outcomes are one error, or the same values bit for bit (NaN equals NaN)."""
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, second, strict=True))


@pytest.fixture(autouse=True)
def fresh_kernels() -> Iterator[None]:
    """No buffer is left from another test, and no kernel is left replaced."""
    dequantize.BUFFERS.clear()
    before = kernels_in_force()
    yield
    dequantize.BUFFERS.clear()
    assert kernels_in_force() == before


def test_every_correction_has_a_row() -> None:
    """A new correction is measured, too; those of released libraries are measured with these."""
    assert set(ROWS) == {one.id for one in registered(Correction).values() if not one.edits}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ROWS)
def test_a_corrected_module_equals_float32_within_its_dtypes_rounding(name: str, device: str) -> None:
    """Its output and every gradient; without the correction it does what the row says."""
    row = ROWS[name]
    subject = Subject.build(row, device)
    bound = ROUNDING[row.dtype]
    before = subject.outcome()
    found = "raises" if isinstance(before, str) else "right" if max(subject.errors(before)) < bound else "wrong"
    assert found == row.fault
    with corrected(subject.model, *row.beside, name, modules=row.modules) as installed:
        results = subject.results()
        assert max(subject.errors(results)) < bound, subject.errors(results)
        assert (len(results) > 1) == row.trains
        assert installed[-1].counters.hits > 0 or (device == "cpu" and not row.counted)
        assert installed[-1].counters.elements("rescued") == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ROWS)
def test_nothing_of_a_correction_stays_when_it_is_undone(name: str, device: str) -> None:
    """Code, forwards, dtypes and stored values are the ones from before, and so is what the module computes."""
    row = ROWS[name]
    subject = Subject.build(row, device)
    before, outcome = standing(subject.model), subject.outcome()
    with corrected(subject.model, *row.beside, name, modules=row.modules) as installed:
        assert standing(subject.model) != before
        subject.results()
    installed[-1].undo()
    assert standing(subject.model) == before
    assert same(subject.outcome(), outcome)


def overflowing(name: str) -> tuple[nn.Module, str, Tensor, dict[str, Any]]:
    """A Gemma-4 in float16 with one large factor, the module that it is in, and what to call that with."""
    torch.manual_seed(0)
    model, x = gemma(), normal((2, 5, 64), 1).half()
    layer = model.get_submodule("model.layers.0")
    if name == "gemma4-scaled-embedding-float32":
        model.get_submodule("model.embed_tokens").weight.data.mul_(5e5)
        return model, "model.embed_tokens", torch.arange(10).view(2, 5), {}
    if name == "gemma4-rms-norm-float32":
        layer.get_submodule("input_layernorm").weight.data.fill_(6e4)
        return model, "model.layers.0.input_layernorm", x, {}
    layer.get_submodule("self_attn.q_norm").weight.data.fill_(6e4)
    return model, "model.layers.0.self_attn", x, rotation_of(x)


@pytest.mark.parametrize(
    "name", ["gemma4-scaled-embedding-float32", "gemma4-rms-norm-float32", "gemma4-attention-float32"]
)
def test_what_float16_cannot_hold_is_finite_with_the_correction(name: str) -> None:
    """A large factor makes the original inf or NaN; elements that were held are counted, none was lost."""
    model, unit, given, extra = overflowing(name)

    def result() -> Tensor:
        with torch.no_grad():
            out = model.get_submodule(unit)(given, **extra)
        return out[0] if isinstance(out, tuple) else out

    assert not torch.isfinite(result()).all()
    with corrected(model, name) as [installed]:
        assert torch.isfinite(result()).all()
    assert installed.counters.elements("rescued") == 0
    assert (installed.counters.elements("clamped") > 0) == (name != "gemma4-attention-float32")


def custom(**options: Any) -> nn.Module:
    """The custom model of the tickets."""
    return build_custom_moe(CustomMoeConfig(**options))


@pytest.mark.parametrize(
    ("name", "build", "modules", "message"),
    [
        ("norm-output-cast", lambda: custom(norm="casting"), (), "no norm of GptOssForCausalLM widens"),
        ("norm-output-cast", lambda: custom(keep_in_fp32=()), (), "no norm of GptOssForCausalLM widens"),
        ("norm-output-cast", lambda: custom(dtype=torch.float32), (), "no float16 or bfloat16 parameters"),
        ("norm-output-cast", custom, ("model.layers.9.norm",), r"has no module model\.layers\.9\.norm"),
        ("norm-output-cast", lambda: custom(norm="casting"), ("model.norm",), r"model\.norm does not widen"),
        ("cast-at-lora-input", lambda: custom(lora_rank=0), (), "has no LinearLoRA"),
        ("cast-at-lora-input", custom, ("lm_head",), "lm_head is not a LinearLoRA"),
        ("quant-state-dtype", lambda: nf4_llama("bf16", "bf16"), (), "each of 14 quant_states already says torch.bfloat16"),
        ("quant-state-dtype", lambda: nf4_llama("f32", "f16"), (), "there is no dequantize kernel for torch.float32"),
        ("quant-state-dtype", llama_tiny, (), "LlamaForCausalLM has no packed weights"),
        ("quant-state-dtype", lambda: nn.Linear(2, 2), (), "Linear has no input embedding"),
        ("dequant-float32-kernel", lambda: nn.Linear(2, 2), (), "no module of Linear runs through the fused LoRA kernels"),
        ("gemma4-mlp-float32-product", lambda: nn.Linear(2, 2), (), "has no Gemma4TextMLP"),
        ("nf4-custom-op", lambda: nn.Linear(2, 2), (), "Linear has no NF4 weight"),
        ("nf4-stream-per-call", lambda: nn.Linear(2, 2), (), "Linear has no NF4 weight"),
    ],
)  # fmt: skip
def test_a_correction_is_refused_where_it_would_do_nothing(
    name: str, build: Callable[[], nn.Module], modules: tuple[str, ...], message: str
) -> None:
    """A correction whose target is not there is not installed in silence; the message says what is missing."""
    with pytest.raises(TargetMismatchError, match=message):
        put_in(name, build(), modules)


@pytest.mark.parametrize(
    ("name", "step", "message"),
    [
        ("dequant-float32-kernel", (dequantize, "choose_kernel"), r"takes \(weight\), .* written for \(dtype\)"),
        ("backward-autocast-off", (fused_lora, "backward_weight"), r"backward_weight takes \(weight\)"),
        ("nf4-custom-op", (nf4_ctypes, "dequantize"), r"takes \(weight\)"),
    ],
)
def test_code_that_a_correction_was_not_written_for_is_left_alone(
    name: str, step: tuple[ModuleType, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference of the signatures is told, and where it is the second of two steps the first one is put back."""
    model = ROWS[name].build()
    monkeypatch.setattr(*step, lambda weight: weight)
    before = kernels_in_force()
    with pytest.raises(TargetMismatchError, match=message):
        put_in(name, model, ())
    assert kernels_in_force() == before
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["dequant-no-shared-buffer", "nf4-custom-op"])
def test_a_step_is_corrected_once(name: str) -> None:
    """A second correction would hide the first, so it is refused."""
    model = ROWS[name].build()
    second = "dequant-buffer-keyed-by-dtype" if name.startswith("dequant") else name
    with corrected(model, name), pytest.raises(TargetMismatchError, match=r"already replaced|replaced already"):
        put_in(second, model, ())


@pytest.mark.parametrize("correction", ["float32-adapters", "bfloat16-weights"])
def test_weights_whose_gradients_are_reduced_over_ranks_keep_their_dtype(correction: str) -> None:
    """DistributedDataParallel listens to a node of the graph that is another one once the dtype has changed: ranks would drift apart."""
    model = ROWS[correction].build()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(TargetMismatchError, match="gradients of several ranks"):
            put_in(correction, model, [])
    finally:
        torch.distributed.destroy_process_group()
    put_in(correction, model, []).undo()
