"""Dtype mismatches and scaler failures of real libraries: watched, looked at again with the op trace, diagnosed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from watched import watched

from dtypedoctor.diagnosis import diagnose, spec_of
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.lab.models.build import quantize_linears
from dtypedoctor.lab.scenarios.model import Quantization

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


def findings(folder: Path, work: Work) -> list[Finding]:
    """The errors and warnings about ``work``, whose failing calls are made again."""

    def replayed(instruments: Instruments) -> None:
        instruments.replay_failures(None)
        work(instruments)

    return [finding for finding in diagnose(watched(folder, replayed)) if finding.severity is not Severity.INFO]


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


def test_a_cast_back_to_the_dtype_of_an_input_is_looked_behind(tmp_path: Path) -> None:
    """A module that returns the dtype it was given has not made it: the float32 norm weights before it have."""

    class Careful(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)

    model = llama()
    for layer in model.model.layers:
        layer.mlp = Careful(nn.Linear(32, 32, dtype=torch.bfloat16))
        layer.post_attention_layernorm.float()
    (finding,) = findings(tmp_path, lambda _: model(input_ids=ids()))
    assert (finding.id, finding.fqn) == ("norm-promotes-to-float32", "model.layers.0.post_attention_layernorm")
    assert finding.confidence == "proven"


def test_a_cast_by_name_is_where_the_dtype_comes_from(tmp_path: Path) -> None:
    """Also where the module was given float32 this time."""

    class Widening(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.bfloat16()).float()

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


class Half(nn.Module):
    def __init__(self, does: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).bfloat16())
        self.does = does

    def forward(self) -> object:
        return self.does(self.weight)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (lambda w: torch.sparse.mm(torch.eye(4).to_sparse_csr(), w), ["unsupported-dtype"]),
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
    ids=[
        "sparse-beside-it",
        "qr",
        "cholesky",
        "cdist",
        "float16",
        "not-definite",
        "shapes",
        "view",
        "constant",
        "two-dtypes",
    ],
)
def test_an_operator_that_half_precision_lacks_is_told_from_one_that_fails_in_any(
    does: Callable[[Tensor], object], expected: list[str], tmp_path: Path
) -> None:
    """It runs on the same numbers in float32, which proves it."""
    found = findings(tmp_path, lambda _: Half(does)())
    assert [finding.id for finding in found] == expected
    assert all(finding.proven_by for finding in found if finding.id == "unsupported-dtype")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_indices_of_few_bits_are_to_be_int64(dtype: torch.dtype, tmp_path: Path) -> None:
    """The embedding runs with int64 in their place; a cast of anything to a floating-point dtype is not advised."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)).bfloat16()
    (finding,) = findings(tmp_path, lambda _: model(torch.arange(4).to(dtype)))
    assert (finding.id, finding.op, bool(finding.proven_by)) == ("unsupported-dtype", "aten.embedding.default", True)
    instead = spec_of(finding.id).instead
    assert instead is not None
    assert "int64" in instead(finding)


class Scores(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries @ keys.T


def test_nothing_is_said_of_the_weights_of_a_module_that_has_none(tmp_path: Path) -> None:
    """What the input meets is another input."""
    (finding, *_) = findings(tmp_path, lambda _: Scores()(torch.ones(2, 4).bfloat16(), torch.ones(3, 4)))
    assert finding.id == "model-input-dtype"
    assert "weights" not in f"{finding.summary} {finding.cause}"


def test_what_a_program_adds_up_in_another_dtype_is_no_cache(tmp_path: Path) -> None:
    """Outside of modules there is none; and a module that adds to its buffer keeps no keys or values there."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.zeros(3))

        def forward(self, weights: Tensor) -> Tensor:
            return self.counts.scatter_add_(0, torch.arange(3), weights)

    half, rows = torch.ones(3, 4).bfloat16(), torch.zeros(3, 4)
    for name, does in (
        ("own", lambda: rows.index_add_(0, torch.arange(3), half)),
        ("module", lambda: Counts()(half[:, 0])),
    ):
        (tmp_path / name).mkdir()
        found = findings(tmp_path / name, lambda _: does())  # noqa: B023
        assert found
        assert "kv-cache-dtype" not in {finding.id for finding in found}


def test_a_loss_and_its_class_weights_are_named_as_they_are(tmp_path: Path) -> None:
    """It is the module that is called, and no model; what its input meets is its buffer."""
    loss, logits = nn.CrossEntropyLoss(weight=torch.ones(3)), torch.ones(2, 3, dtype=torch.bfloat16)
    (finding,) = findings(tmp_path, lambda _: loss(logits, torch.tensor([0, 1])))
    assert finding.summary.startswith("CrossEntropyLoss gets bfloat16 input where its buffer weight is float32; ")


class LeanProduct(torch.autograd.Function):
    """A product whose backward begins with the operator that is rejected: no other shows first in what function it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Saves the weight as it is, while autocast casts it for the product."""
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient has the dtype of the region."""
        x, weight = ctx.saved_tensors
        return torch.mm(grads[0], weight), torch.mm(x, grads[0])


def test_the_first_operator_of_a_custom_backward_is_known_to_be_of_that_function(tmp_path: Path) -> None:
    """Which region its forward ran in decides, and is written before that operator has its number."""

    class Lean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: Tensor) -> Any:
            return LeanProduct.apply(x, self.weight)  # type: ignore[no-untyped-call]

    model = nn.Sequential(nn.Linear(8, 8), Lean())

    def work(_: Instruments) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(8, 8)).sum()
        loss.backward()

    (finding,) = findings(tmp_path, work)
    assert (finding.id, finding.confidence) == ("custom-function-autocast", "proven")
