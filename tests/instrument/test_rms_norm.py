"""RMSNorm of both output contracts, and the two corrections for what the promoting one does to its consumers."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dtypedoctor.corrections.casts import install_norm_output_cast
from dtypedoctor.corrections.contract import TargetMismatchError
from dtypedoctor.models.builtin import llama_tiny
from dtypedoctor.tickets.custom_moe.layers import (
    CastingRMSNorm,
    PromotingRMSNorm,
    install_cast_at_lora_input,
)
from dtypedoctor.tickets.custom_moe.model import CustomMoeConfig, CustomMoeForCausalLM, build_custom_moe

MISMATCH = "expected m(at)?1 and m(at)?2 to have the same dtype, but got: float != c10::BFloat16"
EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def norm_of(cls: type[PromotingRMSNorm], dtype: torch.dtype) -> PromotingRMSNorm:
    """A norm over 64 with weights around 1."""
    torch.manual_seed(0)
    norm = cls(64)
    nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    return norm.to(dtype)


def rows(dtype: torch.dtype) -> Tensor:
    """(32, 64) random values, always the same."""
    torch.manual_seed(1)
    return (torch.randn(32, 64) * 3).to(dtype)


def tokens() -> Tensor:
    """(2, 12) token ids, always the same."""
    return torch.randint(4, 200, (2, 12), generator=torch.Generator().manual_seed(0))


def loss_of(model: CustomMoeForCausalLM) -> Tensor:
    """The loss on the fixed batch."""
    loss = model(tokens(), labels=tokens()).loss
    assert loss is not None
    return loss


@pytest.mark.parametrize("x", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight", [torch.float16, torch.bfloat16, torch.float32])
def test_the_contracts_differ_only_where_weight_and_input_differ(weight: torch.dtype, x: torch.dtype) -> None:
    """One follows type promotion, the other its input."""
    assert norm_of(PromotingRMSNorm, weight)(rows(x)).dtype == torch.promote_types(weight, x)
    assert norm_of(CastingRMSNorm, weight)(rows(x)).dtype == x


def test_torchs_own_rms_norm_follows_its_input() -> None:
    """So not every norm with a float32 weight promotes: the output contract decides, not the weight."""
    norm = nn.RMSNorm(64)
    assert norm(rows(torch.bfloat16)).dtype == torch.bfloat16


def test_both_norms_equal_torchs_in_float32() -> None:
    """Same formula, to float32's rounding."""
    x = rows(torch.float32)
    for cls in (PromotingRMSNorm, CastingRMSNorm):
        norm = norm_of(cls, torch.float32)
        torch.testing.assert_close(norm(x), functional.rms_norm(x, (64,), norm.weight, norm.eps))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_correction_equals_float32_within_its_dtypes_epsilon(dtype: torch.dtype) -> None:
    """Two roundings: each element is off by at most one epsilon, relatively."""
    norm = norm_of(CastingRMSNorm, torch.float32)
    x = rows(dtype)
    reference = functional.rms_norm(x.double(), (64,), norm.weight.double(), norm.eps)
    error = (norm(x).double() - reference).abs()
    assert (error <= 1.01 * torch.finfo(dtype).eps * reference.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_corrections_gradients_equal_float32s_within_the_rounding(dtype: torch.dtype) -> None:
    """Both gradients, in the dtypes of what they belong to."""
    norm = norm_of(CastingRMSNorm, torch.float32)
    x = rows(dtype).requires_grad_()
    incoming = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    norm(x).backward(incoming)
    reference = norm_of(PromotingRMSNorm, torch.float64)
    wide = x.detach().double().requires_grad_()
    reference(wide).backward(incoming.double())
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == dtype
    for found, wanted in ((x.grad, wide.grad), (norm.weight.grad, reference.weight.grad)):
        assert wanted is not None
        assert (found.double() - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()


def test_the_output_cast_cures_and_equals_the_casting_norm_bit_for_bit() -> None:
    """Loss and every gradient are those of the model that was built with casting norms."""
    model = build_custom_moe(CustomMoeConfig(norm="promoting"))
    healthy = build_custom_moe(CustomMoeConfig(norm="casting"))
    installed = install_norm_output_cast(model, ())
    loss, wanted = loss_of(model), loss_of(healthy)
    loss.backward()
    wanted.backward()
    assert torch.equal(loss, wanted)
    gradients = {name: p.grad for name, p in healthy.named_parameters() if p.grad is not None}
    assert gradients
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in gradients)
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, gradients[name])
    assert installed.counters.hits == 5, "two norms in each of two layers, and the last"
    assert "bfloat16" in installed.proof
    assert "corrections/casts.py:" in installed.proof


def test_undoing_keeps_a_forward_that_somebody_else_had_put_there() -> None:
    """Instance patches of other libraries survive installing and undoing."""
    norm = norm_of(PromotingRMSNorm, torch.float32)
    model = nn.Sequential(norm, nn.Linear(64, 64, dtype=torch.bfloat16))
    theirs = copy.copy(norm).forward
    norm.forward = theirs  # type: ignore[method-assign]
    installed = install_norm_output_cast(model, ())
    assert model(rows(torch.bfloat16)).dtype == torch.bfloat16
    installed.undo()
    assert norm.forward is theirs


def test_the_cast_after_norms_cures_transformers_llama_with_float32_norms() -> None:
    """LlamaRMSNorm promotes as well; nothing here is written for the builtin model only."""
    torch.manual_seed(0)
    model = llama_tiny().to(torch.bfloat16)
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    for norm in norms:
        norm.float()
    with pytest.raises(RuntimeError, match=MISMATCH):
        model(input_ids=tokens())
    installed = install_norm_output_cast(model, ())
    assert model(input_ids=tokens()).logits.dtype == torch.bfloat16
    assert installed.counters.hits == len(norms)


def test_only_the_named_norms_are_corrected() -> None:
    """The first layer's first norm no longer widens, its second still does."""
    model = build_custom_moe(CustomMoeConfig())
    install_norm_output_cast(model, ["model.layers.0.input_layernorm"])
    layer = model.model.layers[0]
    x = rows(torch.bfloat16)
    assert layer.get_submodule("input_layernorm")(x).dtype == torch.bfloat16
    assert layer.get_submodule("post_attention_layernorm")(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "modules", "message"),
    [
        (CustomMoeConfig(norm="casting"), (), "no norm of CustomMoeForCausalLM widens"),
        (CustomMoeConfig(keep_in_fp32=()), (), "no norm of CustomMoeForCausalLM widens"),
        (CustomMoeConfig(dtype=torch.float32), (), "no float16 or bfloat16 parameters"),
        (CustomMoeConfig(), ("model.layers.9.norm",), "has no module model.layers.9.norm"),
        (CustomMoeConfig(norm="casting"), ("model.norm",), "model.norm does not widen"),
    ],
)
def test_the_output_cast_refuses_what_it_is_not_for(
    model: CustomMoeConfig, modules: tuple[str, ...], message: str
) -> None:
    """It is never installed where it would do nothing."""
    with pytest.raises(TargetMismatchError, match=message):
        install_norm_output_cast(build_custom_moe(model), modules)


def test_casting_at_the_lora_input_moves_the_failure_to_the_next_consumer() -> None:
    """The router takes the second norm's output and is not adapted: same message, other module."""
    model = build_custom_moe(CustomMoeConfig())
    installed = install_cast_at_lora_input(model, ())
    entered: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
    with pytest.raises(RuntimeError, match=MISMATCH):
        loss_of(model)
    assert entered[-1] == "model.layers.0.mlp.router"
    assert installed.counters.hits == 3, "q, k and v; the input of o is bfloat16 again"


@pytest.mark.parametrize("qlora", [False, True])
def test_casting_at_the_lora_input_cures_where_every_consumer_is_adapted(qlora: bool) -> None:
    """Then it gives what casting the norm's output gives, bit for bit."""
    config = CustomMoeConfig(mlp="dense", lora_targets=EVERY_LINEAR, qlora=qlora)
    guarded, cured = build_custom_moe(config), build_custom_moe(config)
    installed = install_cast_at_lora_input(guarded, ())
    install_norm_output_cast(cured, ())
    assert torch.equal(loss_of(guarded), loss_of(cured))
    assert installed.counters.hits == 11, "q, k, v, gate, up of two layers, and the head"


def test_casting_at_the_lora_input_refuses_models_and_modules_without_it() -> None:
    """The message names what is missing."""
    with pytest.raises(TargetMismatchError, match="has no LinearLoRA"):
        install_cast_at_lora_input(build_custom_moe(CustomMoeConfig(lora_rank=0)), ())
    with pytest.raises(TargetMismatchError, match=r"lm_head is not a LinearLoRA"):
        install_cast_at_lora_input(build_custom_moe(CustomMoeConfig()), ["lm_head"])
