"""Modules kept in float32 compute what a float32 model computes, within the rounding at their borders, and can be let go."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import bitsandbytes as bnb
import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from dtypedoctor.corrections.contract import TargetMismatchError
from dtypedoctor.lab.corrections.casts import install_bfloat16_weights
from dtypedoctor.lab.corrections.keep_float32 import install_keep_float32
from dtypedoctor.lab.models.build import widen

WIDTH, HIDDEN = 32, 64
HALF = (torch.float16, torch.bfloat16)


class Mlp(nn.Module):
    """A gated product whose operands are linears: the shape of a language model's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((HIDDEN,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        product = nn.functional.silu(self.gate(x)) * self.up(x) * self.scale
        out: Tensor = self.down(product)
        return out


class Model(nn.Module):
    """A residual around the MLP and a norm, so that something lies outside of what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def plain(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Model().to(dtype)


def lora(dtype: torch.dtype) -> nn.Module:
    """The same with LoRA around gate and down, their adapters in ``dtype`` and not zero."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["gate", "down"])
    model = get_peft_model(plain(dtype), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.base_model.model


def four_bit(dtype: torch.dtype) -> nn.Module:
    """The same with NF4 weights in gate and down, read in ``dtype``."""
    model = plain(dtype)
    for name in ("gate", "down"):
        linear = getattr(model.mlp, name)
        packed = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
        )
        packed.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        setattr(model.mlp, name, packed.to("cpu"))
    return model


KINDS: dict[str, Callable[[torch.dtype], nn.Module]] = {"plain": plain, "lora": lora, "4-bit": four_bit}


@contextmanager
def kept(model: nn.Module, *names: str) -> Iterator[None]:
    installed = install_keep_float32(model, names)
    try:
        yield
    finally:
        installed.undo()


def pass_through(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and every gradient of one pass, in float32."""
    x = x.clone().requires_grad_()
    out = model(x)
    model.zero_grad(set_to_none=True)
    out.float().square().sum().backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"output": out.detach().float(), "input": x.grad.float()}


def batch(dtype: torch.dtype) -> Tensor:
    """Five rows."""
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each in the Frobenius norm."""
    assert found.keys() == exact.keys()
    return {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def exact_pass(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The same weights, as they are rounded and packed, in float32 throughout."""
    twin = copy.deepcopy(model)
    widen(twin)
    return pass_through(twin, x.float())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_that_is_kept_equals_float32(kind: str, dtype: torch.dtype) -> None:
    """Output and all gradients differ from float32 by the rounding of what leaves: half a unit in the last place, or two."""
    model = KINDS[kind](dtype)
    x = batch(dtype)
    exact = exact_pass(model, x)
    with kept(model, ""):
        errors = error(pass_through(model, x), exact)
    assert max(errors.values()) < torch.finfo(dtype).eps, errors


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_inputs_keep_their_dtype(kind: str) -> None:
    """What is around a kept module sees the dtype that it always saw, in both directions."""
    model = KINDS[kind](torch.float16)
    seen: dict[str, torch.dtype] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.register_hook(lambda gradient: seen.update(norm=gradient.dtype))

    model.norm.register_forward_hook(note)
    x = batch(torch.float16).requires_grad_()
    with kept(model, "mlp"):
        out = model(x)
        out.sum().backward()
    assert out.dtype is torch.float16
    assert x.grad.dtype is torch.float16
    assert seen == {"norm": torch.float16}


@pytest.mark.parametrize("name", ["", "mlp", "mlp::self", "mlp.gate"])
@pytest.mark.parametrize("kind", KINDS)
def test_afterwards_everything_is_as_it_was(kind: str, name: str) -> None:
    """Forwards, dtypes and values come back bit for bit, and so does what the model computes."""
    model = KINDS[kind](torch.float16)
    x = batch(torch.float16)
    before, dtypes = pass_through(model, x), {n: t.dtype for n, t in model.state_dict().items()}
    forwards = {n: m.__dict__.get("forward") for n, m in model.named_modules()}
    with kept(model, name):
        pass_through(model, x)
    model.zero_grad(set_to_none=True)
    assert {n: t.dtype for n, t in model.state_dict().items()} == dtypes
    assert {n: m.__dict__.get("forward") for n, m in model.named_modules()} == forwards
    after = pass_through(model, x)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_module_that_is_not_there_is_refused() -> None:
    """Nothing is skipped in silence, and nothing is left half done."""
    model = plain(torch.float16)
    with pytest.raises(TargetMismatchError, match=r"has no module mlp\.gait"):
        install_keep_float32(model, ["mlp", "mlp.gait"])
    with pytest.raises(TargetMismatchError, match="no module is named"):
        install_keep_float32(model, [])
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


@pytest.mark.parametrize("names", [["mlp"], ["mlp.up"], [""]])
def test_weights_that_an_offload_loads_for_each_call_are_refused_by_name(names: list[str]) -> None:
    """Widened between the calls they would be float16 again in each; where nothing is kept, nothing is refused."""
    model = nn.ModuleDict({"mlp": Mlp(), "other": nn.ReLU()}).half()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(TargetMismatchError, match=r"mlp\.\w+\.\w+ is on the meta device .* without the offload"):
        install_keep_float32(model, names)
    with pytest.raises(TargetMismatchError, match="is on the meta device"):
        install_bfloat16_weights(model, [])
    install_keep_float32(model, ["other"]).undo()


def test_calls_and_what_the_border_had_to_hold_back_are_counted() -> None:
    """One call, and each element beyond float16's range where it left for code that is not kept."""
    model = plain(torch.float16)
    with torch.no_grad():
        model.mlp.down.weight.fill_(60_000.0)
        model.mlp.scale.fill_(100.0)
    installed = install_keep_float32(model, ["mlp"])
    out = model.mlp(batch(torch.float16))
    installed.undo()
    assert installed.counters.hits == 1
    assert out.isfinite().all()
    assert installed.counters.elements("clamped") == int((out.abs() == torch.finfo(torch.float16).max).sum()) > 0
