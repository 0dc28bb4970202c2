"""Dtype mismatches and scaler failures of real libraries: watched, looked at again with the op trace, diagnosed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_llama import LINEARS, nf4_llama, region
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.diagnosis.window import suspicious_windows
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.optrace import OpWindow
from dtypedoctor.models.build import quantize_linears
from dtypedoctor.scenario.model import Quantization
from dtypedoctor.tickets.fused_llama import dequantize

Work = Callable[[Instruments], Any]
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def fresh_buffers() -> None:
    """No dequantise buffer is left from another test."""
    dequantize.BUFFERS.clear()


def findings(folder: Path, work: Work) -> list[Finding]:
    """The errors and warnings about ``work``, which is run a second time where the first run shows where to look."""
    first, second = folder / "first", folder / "second"
    first.mkdir()
    trace = watched(first, work)
    windows = suspicious_windows(trace)
    if windows:
        second.mkdir()
        dequantize.BUFFERS.clear()
        trace = watched(second, work, OpWindow(**windows[0].model_dump()))
    return [finding for finding in diagnose(trace) if finding.severity is not Severity.INFO]


def ids() -> Tensor:
    """A batch of tokens."""
    return torch.arange(24).reshape(2, 12) % 64


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A tiny Llama cast as ``from_pretrained`` casts: rotary buffers keep their precision."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def train_once(model: Any, autocast: str) -> Work:
    """One forward and backward pass of a fused Llama in a region."""

    def work(_: Instruments) -> None:
        with region(autocast):
            model(input_ids=ids(), labels=ids()).loss.backward()

    return work


FUSED = [
    pytest.param("bf16", "bf16", LINEARS, "f16", ["autocast-contradicts-model", "autocast-bypass"], id="a"),
    pytest.param("bf16", "f16", LINEARS, "f16", ["autocast-contradicts-model", "autocast-bypass"], id="a-with-b"),
    pytest.param("bf16", "f16", LINEARS, "off", ["quant-state-dtype"], id="b"),
    pytest.param("bf16", "f16", LINEARS, "bf16", ["quant-state-dtype"], id="c"),
    pytest.param("f32", "f16", ["down_proj"], "f16", ["custom-function-autocast"], id="d"),
]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(("dtype", "state", "targets", "autocast", "expected"), FUSED)
def test_variants_of_a_fused_projection_are_told_apart(
    dtype: str, state: str, targets: list[str], autocast: str, expected: list[str], tmp_path: Path
) -> None:
    """They look alike to a user; what is found first is each one's own cause, and proven."""
    found = [
        f
        for f in findings(tmp_path, train_once(nf4_llama(dtype, state, targets), autocast))
        if f.severity is Severity.ERROR
    ]
    assert [f.id for f in found] == expected
    assert {f.confidence for f in found} == {"proven"}


def test_a_healthy_fused_model_is_silent(tmp_path: Path) -> None:
    """bfloat16 weights, states and region."""
    found = findings(tmp_path, train_once(nf4_llama("bf16", "bf16"), "bf16"))
    assert [f.id for f in found if f.severity is Severity.ERROR] == []


def test_a_backward_failure_names_phase_function_and_packed_weight(tmp_path: Path) -> None:
    """The forward passes under bfloat16 autocast; the in-place sum of the backward gets the float16 weight."""
    (finding, *_) = findings(tmp_path, train_once(nf4_llama("bf16", "f16"), "bf16"))
    assert (finding.phase, finding.op) == ("backward", "aten.addmm_.default")
    assert finding.fqn is not None
    assert finding.fqn.endswith("base_layer")
    assert finding.provenance[-1].op.startswith("quant-state: ")


def test_norms_lifted_to_float32_are_found_behind_the_projection_that_refuses(tmp_path: Path) -> None:
    """LlamaRMSNorm multiplies by its weight last."""
    model = llama()
    for layer in model.model.layers:
        layer.input_layernorm.float()
    (finding,) = findings(tmp_path, lambda _: model(input_ids=ids()))
    assert (finding.id, finding.fqn) == ("norm-promotes-to-float32", "model.layers.0.input_layernorm")
    assert finding.confidence == "proven"


CASTING_BACK: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "to its dtype": lambda layer, x: layer(x.to(layer.weight.dtype)).to(x.dtype),
    "like it": lambda layer, x: layer(x.bfloat16()).type_as(x),
    "a mask in its dtype": lambda layer, x: (torch.arange(x.shape[-1]) >= 0).to(x.dtype) * x,
    "another output in its dtype": lambda layer, x: layer(x.bfloat16()).relu().to(x.dtype) + x,
}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("kind", CASTING_BACK)
def test_a_cast_back_to_the_dtype_of_an_input_is_looked_behind(kind: str, tmp_path: Path) -> None:
    """A module that returns the dtype it was given has not made it: the float32 norm weights before it have."""

    class Careful(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return CASTING_BACK[kind](self.layer, x)

    model = llama()
    for layer in model.model.layers:
        layer.mlp = Careful(nn.Linear(32, 32, dtype=torch.bfloat16))
        layer.post_attention_layernorm.float()
    (finding,) = findings(tmp_path, lambda _: model(input_ids=ids()))
    assert (finding.id, finding.fqn) == ("norm-promotes-to-float32", "model.layers.0.post_attention_layernorm")
    assert finding.confidence == "proven"


NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "a method": lambda x: x.float(),
    "an argument": lambda x: x.to(torch.float32),
    "over lines": lambda x: x.to(
        dtype=torch.float32,
    ),
    "as ever": lambda x: x.to(WIDE[0]),
}
WIDE = [torch.float32]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("kind", NAMED)
def test_a_cast_by_name_is_where_the_dtype_comes_from(kind: str, tmp_path: Path) -> None:
    """Also where the module was given float32 this time; a dtype that stands elsewhere is known by what other calls were given."""

    class Widening(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return NAMED[kind](super().forward(x.bfloat16()))

    model = llama()
    for layer in model.model.layers:
        layer.mlp = Widening(32, 32, dtype=torch.bfloat16)
    (finding,) = findings(tmp_path, lambda _: model(input_ids=ids()))
    assert finding.provenance[-1].op == "cast"
    assert finding.fqn != "model.layers.0.post_attention_layernorm"


def test_float32_norms_of_a_4_bit_model_are_found_behind_layers_that_cast_back(tmp_path: Path) -> None:
    """bitsandbytes' layers return what they got; every dtype between the first norm and the head is float32."""
    model = llama()
    spec = Quantization(kind="nf4", skip=["lm_head"])
    quantize_linears(model, spec, torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    (finding,) = findings(tmp_path, lambda _: model(input_ids=ids()))
    assert (finding.id, finding.fqn) == ("norm-promotes-to-float32", "model.layers.0.input_layernorm")
    assert finding.confidence == "proven"


def test_the_same_norms_under_bfloat16_autocast_are_silent(tmp_path: Path) -> None:
    """Autocast casts what the projection gets."""
    model = llama()
    for layer in model.model.layers:
        layer.input_layernorm.float()

    def work(_: Instruments) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=ids())

    assert findings(tmp_path, work) == []


def test_a_float32_head_on_a_bfloat16_body_is_found(tmp_path: Path) -> None:
    """`lm_head.float()` without a cast of what it is given."""
    model = llama()
    model.lm_head.float()
    (finding,) = findings(tmp_path, lambda _: model(input_ids=ids()))
    assert (finding.id, finding.fqn, finding.provenance[-1].op) == (
        "head-dtype-mismatch",
        "lm_head",
        "load-dtype: lm_head.weight",
    )


def test_a_module_that_t5_keeps_in_float32_is_named_with_its_entry(tmp_path: Path) -> None:
    """T5 keeps `wo` in float32 and casts for it; a hook that undoes the cast is refused there."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", dtype=torch.float16).eval()
    wo = model.encoder.block[0].layer[1].DenseReluDense.wo
    assert wo.weight.dtype is torch.float32
    wo.register_forward_pre_hook(lambda _, args: (args[0].half(),))
    (finding, *_) = findings(tmp_path, lambda _: model(input_ids=ids(), decoder_input_ids=ids()))
    assert finding.id == "operand-dtype-mismatch"
    assert finding.provenance[-1].op.startswith("keep-in-fp32: ")
    assert "'wo'" in finding.cause


class Store(nn.Module):
    """Writes keys into memory that it made in a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.memory = torch.zeros(1, 16, 8, dtype=dtype)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.memory.index_copy_(1, at, self.project(x))
        return self.memory[:, : int(at[-1]) + 1]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, ["kv-cache-dtype"]), (torch.bfloat16, [])])
def test_a_static_cache_of_another_dtype_is_found(dtype: torch.dtype, expected: list[str], tmp_path: Path) -> None:
    """The memory is a plain attribute, older than the call."""
    store = Store(dtype)

    def work(_: Instruments) -> None:
        with torch.no_grad():
            store(torch.ones(1, 4, 8, dtype=torch.bfloat16), torch.arange(4))

    assert [f.id for f in findings(tmp_path, work)] == expected


class Merger(nn.Module):
    """Writes features of a tower into embeddings under a mask."""

    def __init__(self, tower: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, dtype=torch.bfloat16)
        self.tower = nn.Linear(4, 4, dtype=tower)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        x = self.words(tokens)
        x[tokens == 0] = self.tower(seen)
        return x


@pytest.mark.parametrize(("tower", "expected"), [(torch.float32, ["merge-dtype-mismatch"]), (torch.bfloat16, [])])
def test_features_merged_in_another_dtype_are_found(tower: torch.dtype, expected: list[str], tmp_path: Path) -> None:
    """`index_put_` casts nothing."""
    merger = Merger(tower)

    def work(_: Instruments) -> None:
        with torch.no_grad():
            merger(torch.tensor([[0, 1, 0, 2]]), torch.ones(2, 4, dtype=tower))

    assert [f.id for f in findings(tmp_path, work)] == expected


def scaled(model: nn.Module, loss: Callable[[], Tensor]) -> Work:
    """One step with a gradient scaler."""

    def work(_: Instruments) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()

    return work


def test_pefts_saved_copy_in_float16_is_what_the_scaler_refuses(tmp_path: Path) -> None:
    """Adapters are lifted to float32, the copy of `modules_to_save` is not."""
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(llama(torch.float16), config)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(input_ids=ids(), labels=ids()).loss

    found = findings(tmp_path, scaled(model, loss))
    assert found[0].id == "unscale-float16-gradients"
    assert found[0].fqn == "base_model.model.lm_head.modules_to_save.default"


def test_a_bfloat16_model_with_a_scaler_is_warned_of(tmp_path: Path) -> None:
    """A CPU goes along."""
    net = nn.Linear(4, 1).bfloat16()
    found = findings(tmp_path, scaled(net, lambda: net(torch.ones(2, 4).bfloat16()).sum()))
    assert [f.id for f in found][:1] == ["scaler-bfloat16"]


class Half(nn.Module):
    """Does something with a weight in half precision."""

    def __init__(self, does: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).bfloat16())
        self.does = does

    def forward(self) -> object:
        """What is done with the weight."""
        return self.does(self.weight)


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (torch.linalg.qr, ["unsupported-dtype"]),
        (torch.linalg.cholesky, ["unsupported-dtype"]),
        (lambda w: torch.cdist(w, w), ["unsupported-dtype"]),
        (lambda w: torch.linalg.qr(w.half()), ["unsupported-dtype"]),
        (lambda w: torch.linalg.cholesky(w.float() - 2), []),
        (lambda w: w @ w[:3].half().bfloat16(), []),
        (lambda w: w.view(5, 5), []),
        (lambda w: w.half().masked_fill(w > 0, -1e9), ["float16-overflow"]),
        (lambda w: w @ w.float(), ["operand-dtype-mismatch"]),
    ],
    ids=["qr", "cholesky", "cdist", "float16", "not-definite", "shapes", "view", "constant", "two-dtypes"],
)
def test_an_operator_that_half_precision_lacks_is_told_from_one_that_fails_in_any(
    does: Callable[[Tensor], object], expected: list[str], tmp_path: Path
) -> None:
    """It runs on the same numbers in float32, which proves it."""
    found = findings(tmp_path, lambda _: Half(does)())
    assert [finding.id for finding in found] == expected
    assert all(finding.proven_by for finding in found if finding.id == "unsupported-dtype")
