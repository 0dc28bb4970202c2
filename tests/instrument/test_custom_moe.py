"""The custom decoder: what the keep list keeps, how the promoting norm fails, and what corrections make of it."""

import pytest
import torch
from torch import Tensor, nn

from dtypedoctor.lab.tickets.custom_moe import CustomMoeConfig, build_custom_moe, install_cast_at_lora_input

pytestmark = pytest.mark.slow


MISMATCH = "have the same dtype, but got"
NORMS = [
    "model.layers.0.input_layernorm",
    "model.layers.0.post_attention_layernorm",
    "model.layers.1.input_layernorm",
    "model.layers.1.post_attention_layernorm",
    "model.norm",
]


def tokens() -> Tensor:
    """(2, 12) token ids, always the same."""
    return torch.randint(4, 200, (2, 12), generator=torch.Generator().manual_seed(0))


def failing_module(model: nn.Module) -> str:
    """Runs the model into its dtype mismatch and returns the innermost module that was entered."""
    entered: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
    with pytest.raises(RuntimeError, match=MISMATCH):
        model(input_ids=tokens(), labels=tokens())
    return entered[-1]


def in_float32(model: nn.Module) -> set[str]:
    """Modules with float32 parameters."""
    return {name.rpartition(".")[0] for name, one in model.named_parameters() if one.dtype == torch.float32}


def test_the_keep_list_matches_parts_of_names() -> None:
    """`norm` alone would have kept every norm: it is contained in the other names."""
    assert in_float32(build_custom_moe(CustomMoeConfig())) == set(NORMS)
    assert in_float32(build_custom_moe(CustomMoeConfig(keep_in_fp32=["norm"]))) == set(NORMS)


def test_reconciling_against_the_list_rounds_the_norm_weights() -> None:
    """Honoring the list changes nothing."""
    ignoring = build_custom_moe(CustomMoeConfig(reconcile="ignore-keep-list"))
    assert {parameter.dtype for parameter in ignoring.parameters()} == {torch.bfloat16}
    honoring = build_custom_moe(CustomMoeConfig(reconcile="honour-keep-list"))
    assert in_float32(honoring) == set(NORMS)
    exact = build_custom_moe(CustomMoeConfig())
    assert all(torch.equal(a, b) for a, b in zip(honoring.parameters(), exact.parameters(), strict=True))


def test_an_evaluation_pass_does_not_cost_the_4_bit_layers_their_gradients() -> None:
    """bitsandbytes reorders packed bytes in an eval-mode forward on some CPUs, and has no gradient for what follows."""
    gradients = []
    for evaluate in (False, True):
        model = build_custom_moe(CustomMoeConfig(norm="casting", qlora=True))
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(input_ids=tokens())
            model.train()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])


def test_casting_at_the_lora_input_moves_the_failure_to_the_next_consumer() -> None:
    """The router takes the second norm's output and is not adapted: same message, other module."""
    model = build_custom_moe(CustomMoeConfig())
    installed = install_cast_at_lora_input(model, ())
    assert failing_module(model) == "model.layers.0.mlp.router"
    assert installed.counters.hits == 3, "q, k and v; the input of o is bfloat16 again"
