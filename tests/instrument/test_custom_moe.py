"""The custom decoder: what the keep list keeps, how the promoting norm fails, and which changes cure it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watched import watched

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.tickets.custom_moe.layers import Attention, MixtureOfExperts, clamped_gate, rotate
from dtypedoctor.tickets.custom_moe.model import (
    GPT_OSS_KEEP_LIST,
    CustomMoeConfig,
    CustomMoeForCausalLM,
    build_custom_moe,
    cast_to_dtype,
    load_weights,
    reconcile_dtypes,
)
from dtypedoctor.trace.events import Flow, ParameterNote, Raised

pytestmark = pytest.mark.slow


MISMATCH = "expected m(at)?1 and m(at)?2 to have the same dtype, but got: float != c10::BFloat16"
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


def train(model: CustomMoeForCausalLM, steps: int = 4, autocast: bool = False) -> list[float]:
    """The losses of a few optimizer steps on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(tokens(), labels=tokens()).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def failing_module(model: CustomMoeForCausalLM) -> str:
    """Runs the model into its dtype mismatch and returns the innermost module that was entered."""
    entered: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
    with pytest.raises(RuntimeError, match=MISMATCH):
        model(tokens(), labels=tokens())
    return entered[-1]


def test_the_keep_list_matches_parts_of_names_and_the_first_entry_is_the_reason() -> None:
    """`norm` alone would have kept every norm: it is contained in the other names."""
    model = build_custom_moe(CustomMoeConfig())
    assert model.kept_in_fp32 == {
        "model.layers.0.input_layernorm": "input_layernorm",
        "model.layers.0.post_attention_layernorm": "post_attention_layernorm",
        "model.layers.1.input_layernorm": "input_layernorm",
        "model.layers.1.post_attention_layernorm": "post_attention_layernorm",
        "model.norm": "norm",
    }
    assert build_custom_moe(CustomMoeConfig(keep_in_fp32=["norm"])).kept_in_fp32 == dict.fromkeys(NORMS, "norm")
    by_dtype = {name: p.dtype for name, p in model.named_parameters()}
    assert {name for name, dtype in by_dtype.items() if dtype == torch.float32} == {f"{name}.weight" for name in NORMS}


def test_casting_leaves_packed_and_integer_storage_alone() -> None:
    """Buffers are cast as parameters are, bytes are not."""
    model = nn.Module()
    model.register_buffer("scales", torch.ones(3))
    model.register_buffer("bytes", torch.ones(3, dtype=torch.uint8))
    kept = cast_to_dtype(model, torch.float16)
    assert (model.scales.dtype, model.bytes.dtype, kept) == (torch.float16, torch.uint8, {})


@pytest.mark.parametrize(
    ("options", "module"),
    [
        ({}, "model.layers.0.self_attn.q_proj.base"),
        ({"reconcile": "honour-keep-list"}, "model.layers.0.self_attn.q_proj.base"),
        ({"qlora": True}, "model.layers.0.self_attn.q_proj.lora_a"),
        ({"qlora": True, "reconcile": "honour-keep-list"}, "model.layers.0.self_attn.q_proj.lora_a"),
        ({"lora_rank": 0}, "model.layers.0.self_attn.q_proj"),
        ({"lora_rank": 0, "qlora": True}, "model.layers.0.mlp.router"),
        ({"mlp": "dense"}, "model.layers.0.self_attn.q_proj.base"),
    ],
)
def test_the_promoting_norm_fails_in_the_first_dense_weight_behind_it(options: dict[str, Any], module: str) -> None:
    """bitsandbytes' layer takes the float32 and gives float32 back, so with 4-bit weights it is the update that fails."""
    assert failing_module(build_custom_moe(CustomMoeConfig(**options))) == module


@pytest.mark.parametrize("qlora", [False, True])
@pytest.mark.parametrize(
    ("options", "autocast"),
    [
        ({"norm": "casting"}, False),
        ({"keep_in_fp32": ()}, False),
        ({"reconcile": "ignore-keep-list"}, False),
        ({}, True),
    ],
)
def test_each_fix_of_the_mixture_of_experts_makes_it_train(
    options: dict[str, Any], autocast: bool, qlora: bool
) -> None:
    """A norm that casts back, no keep list, dtypes made uniform against the list, bfloat16 autocast: each trains."""
    losses = train(build_custom_moe(CustomMoeConfig(qlora=qlora, **options)), autocast=autocast)
    assert losses[-1] < losses[0] - 0.1


def test_the_cured_runs_start_from_the_float32_loss() -> None:
    """Within bfloat16's rounding of the logits."""
    reference = train(build_custom_moe(CustomMoeConfig(dtype=torch.float32)), steps=1)[0]
    for options in ({"norm": "casting"}, {"keep_in_fp32": ()}, {"reconcile": "ignore-keep-list"}):
        cured = train(build_custom_moe(CustomMoeConfig(**options)), steps=1)[0]
        assert cured == pytest.approx(reference, rel=2 * torch.finfo(torch.bfloat16).eps)


def test_reconciling_against_the_list_costs_the_norm_weights_their_last_bits() -> None:
    """Half a unit in the last place of bfloat16, 2**-8 relatively, and the report says so; honouring it changes nothing."""
    ignoring = build_custom_moe(CustomMoeConfig(reconcile="ignore-keep-list"))
    assert ignoring.reconciled is not None
    assert ignoring.reconciled.changed == {f"{name}.weight": "float32" for name in NORMS}
    assert ignoring.kept_in_fp32 == {}
    assert all(0 < cost <= 2**-8 for cost in ignoring.reconciled.rounding.values())
    honouring = build_custom_moe(CustomMoeConfig(reconcile="honour-keep-list"))
    assert honouring.reconciled is not None
    assert (honouring.reconciled.changed, set(honouring.reconciled.kept)) == ({}, set(NORMS))


def test_reconciling_finds_what_a_checkpoint_left_in_another_dtype() -> None:
    """The thread's first suspicion, an embedding left in float32, is what this step is for."""
    model = build_custom_moe(CustomMoeConfig(keep_in_fp32=()))
    model.model.embed_tokens.float()
    assert failing_module(model) == "model.layers.0.self_attn.q_proj.base"
    done = reconcile_dtypes(model, torch.bfloat16, GPT_OSS_KEEP_LIST)
    assert done.changed == {"model.embed_tokens.weight": "float32"}
    assert done.rounding == {"model.embed_tokens.weight": 0.0}, "it had been bfloat16 before"
    train(model, steps=1)


def test_loading_copies_values_and_keeps_the_models_dtypes() -> None:
    """float32 values arrive rounded in the bfloat16 weights and whole in the kept norms."""
    model = build_custom_moe(CustomMoeConfig(lora_rank=0))
    weights = {name: torch.randn_like(tensor, dtype=torch.float32) for name, tensor in model.state_dict().items()}
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    load_weights(model, weights)
    after = model.state_dict()
    assert {name: tensor.dtype for name, tensor in after.items()} == before
    assert torch.equal(after["model.norm.weight"], weights["model.norm.weight"])
    assert torch.equal(after["lm_head.weight"], weights["lm_head.weight"].bfloat16())


def test_loading_refuses_weights_of_another_model() -> None:
    """The message names what does not fit."""
    model = build_custom_moe(CustomMoeConfig(lora_rank=0))
    weights = dict(model.state_dict())
    del weights["lm_head.weight"]
    with pytest.raises(UsageError, match=r"do not fit the model: lm_head\.weight"):
        load_weights(model, weights)
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        load_weights(model, weights | {"lm_head.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer"}, "norm is 'layer'"),
        ({"reconcile": "yes"}, "reconcile is 'yes'"),
        ({"mlp": "sparse"}, "mlp is 'sparse'"),
        ({"lora_targets": ["c_attn"]}, "no linear layer is named c_attn"),
    ],
)
def test_wrong_options_are_refused_with_what_is_known(options: dict[str, Any], message: str) -> None:
    """A usage error with a hint, not a traceback from inside."""
    with pytest.raises(UsageError, match=message) as caught:
        build_custom_moe(CustomMoeConfig(**options))
    assert caught.value.hint


def test_building_is_repeatable_and_leaves_the_random_state_alone() -> None:
    """The seed decides the weights, and nothing outside notices."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (build_custom_moe(CustomMoeConfig()).state_dict() for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_custom_moe(CustomMoeConfig(seed=1)).state_dict()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_with_a_rank_only_the_adapters_are_trained() -> None:
    """Everything else is frozen; without a rank everything is trained."""
    adapted = build_custom_moe(CustomMoeConfig())
    assert all(".lora_" in name for name, p in adapted.named_parameters() if p.requires_grad)
    assert all(p.requires_grad for p in build_custom_moe(CustomMoeConfig(lora_rank=0)).parameters())


def test_an_evaluation_pass_does_not_cost_the_4_bit_layers_their_gradients() -> None:
    """bitsandbytes reorders packed bytes in an eval-mode forward on some CPUs, and has no gradient for what follows."""
    gradients = []
    for evaluate in (False, True):
        model = build_custom_moe(CustomMoeConfig(norm="casting", qlora=True))
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(tokens())
            model.train()
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])


def test_the_trace_shows_the_norm_that_widened_and_the_layer_that_raised(tmp_path: Path) -> None:
    """The first module with a float32 output from bfloat16 input is the norm; its weight is the only float32 it holds."""
    model = build_custom_moe(CustomMoeConfig())

    def work(instruments: Instruments) -> None:
        instruments.attach(model)
        model(tokens(), labels=tokens())

    trace = watched(tmp_path, work)
    raised = trace.last(Raised)
    assert raised is not None
    assert raised.modules[-1] == "model.layers.0.self_attn.q_proj.base"
    flows = [record for record in trace.all(Flow) if record.outputs]
    widened = next(f for f in flows if f.inputs[:1] == ["bfloat16"] and f.outputs == ["float32"])
    assert (widened.fqn, widened.weights) == ("model.layers.0.input_layernorm", ["float32"])
    notes = {note.name: note.dtype for note in trace.all(ParameterNote)}
    assert notes["model.layers.0.input_layernorm.weight"] == "float32"
    assert notes["model.layers.0.self_attn.q_proj.base.weight"] == "bfloat16"
    assert model.kept_in_fp32[widened.fqn] == "input_layernorm"


def test_attention_without_sinks_is_scaled_dot_product_attention() -> None:
    """With the sinks at minus infinity the softmax has nothing more in it."""
    torch.manual_seed(0)
    attention = Attention(32, heads=4, kv_heads=2, head_dim=8)
    nn.init.constant_(attention.sinks, float("-inf"))
    x = torch.randn(2, 6, 32)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, 8)).transpose(1, 2)

    query, key = rotate(heads(attention.q_proj(x))), rotate(heads(attention.k_proj(x)))
    value = heads(attention.v_proj(x))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(x, causal), attention.o_proj(mixed.transpose(1, 2).flatten(2)))


def test_a_sink_takes_weight_from_every_token() -> None:
    """A large sink logit leaves next to nothing of the values."""
    torch.manual_seed(0)
    attention = Attention(32, heads=4, kv_heads=2, head_dim=8)
    x = torch.randn(1, 5, 32)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    nn.init.constant_(attention.sinks, 30.0)
    assert attention(x, causal).abs().max() < 1e-6


def test_a_padded_token_changes_nothing_for_the_others() -> None:
    """Left padding is hidden by the mask: the real tokens' logits do not depend on what stands there."""
    model = build_custom_moe(CustomMoeConfig(dtype=torch.float32))
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    other = ids.clone()
    other[:, :3] = 7
    first, second = model(ids, attention_mask=mask).logits, model(other, attention_mask=mask).logits
    assert first is not None
    assert second is not None
    torch.testing.assert_close(first[:, 3:], second[:, 3:])


def test_rotated_scores_depend_on_the_distance_only() -> None:
    """The property that defines the rotary embedding."""
    torch.manual_seed(0)
    query, key = torch.randn(16), torch.randn(16)
    scores = rotate(query.expand(1, 1, 9, 16)).squeeze() @ rotate(key.expand(1, 1, 9, 16)).squeeze().T
    for distance in range(1, 5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_the_experts_compute_what_a_loop_over_tokens_computes() -> None:
    """Dense products with zero weights are routing."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 8, experts=4, top_k=2)
    x = torch.randn(2, 5, 16)
    wanted = torch.zeros_like(x)
    for place in [(b, t) for b in range(2) for t in range(5)]:
        best, chosen = layer.router(x[place]).topk(2)
        for share, expert in zip(best.softmax(-1), chosen, strict=True):
            gate, up = (x[place] @ layer.gate_up_proj[expert]).chunk(2)
            wanted[place] += share * (clamped_gate(gate, up) @ layer.down_proj[expert])
    torch.testing.assert_close(layer(x), wanted)
