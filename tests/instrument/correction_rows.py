"""On what each correction is measured: one row for each, with the module that is called and float32's results for it."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from fused_llama import DTYPES, nf4_llama, normal, packed, relative_error
from torch import Tensor, nn

from dtypedoctor.lab.models.build import widen
from dtypedoctor.lab.tickets import dequantize
from dtypedoctor.lab.tickets.custom_moe import CustomMoeConfig, build_custom_moe
from dtypedoctor.lab.tickets.gemma4 import gemma4_tiny
from dtypedoctor.lab.tickets.nf4_compiled import Nf4CompiledConfig, build_nf4_compiled

LLAMA_MLP = "base_model.model.model.layers.0.mlp"


def gemma(hidden: int = 64, mlp_scale: float = 1.0, query_scale: float = 1.0) -> nn.Module:
    """A tiny Gemma-4 in float16 whose first layer's gate, up and query-norm weights are multiplied by these factors."""
    model = gemma4_tiny(hidden=hidden)
    model.get_submodule("model.layers.0.self_attn.q_norm").weight.data.mul_(query_scale)
    for name in ("gate_proj", "up_proj"):
        model.get_submodule(f"model.layers.0.mlp.{name}").weight.data.mul_(mlp_scale)
    return model.half()


def dense_custom() -> nn.Module:
    """The custom model in bfloat16 with float32 norms and a plain MLP, its updates not zero."""
    model = build_custom_moe(CustomMoeConfig(mlp="dense"))
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def nf4_compiled() -> nn.Module:
    """The compiled model's builder, with updates that are not zero."""
    model = build_nf4_compiled(Nf4CompiledConfig())
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def narrow_adapters() -> nn.Module:
    """A bfloat16 layer with LoRA in bfloat16, as trainers leave it, whose update is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = nn.Sequential(OrderedDict(proj=nn.Linear(64, 64, dtype=torch.bfloat16)))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["proj"]), autocast_adapter_dtype=False)
    nn.init.normal_(model.get_submodule("base_model.model.proj.lora_B.default").weight, std=0.1)
    return model


def rotation_of(x: Tensor) -> dict[str, Any]:
    """What Gemma-4's attention takes besides hidden states, for the default rotary base."""
    angles = torch.arange(x.shape[1])[:, None] / 10_000 ** (torch.arange(8) / 8)
    table = torch.cat((angles, angles), dim=1)[None].to(x.device)
    position = tuple(part.to(x.dtype) for part in (table.cos(), table.sin()))
    return {"position_embeddings": position, "attention_mask": None, "shared_kv_states": {}}


def causal(x: Tensor) -> dict[str, Any]:
    """What a layer of the custom model takes: the same, without what Gemma-4's layers share."""
    return {name: value for name, value in rotation_of(x).items() if name != "shared_kv_states"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """On what a correction is measured.

    Attributes:
        build: the model, in the dtype that the correction is for.
        unit: dotted name of the module that is called.
        dtype: whose rounding the results may show (``f16``, ``bf16``, ``f32``).
        fault: what the unit does without the correction: ``raises``, ``wrong`` (not finite, or outside the rounding) or
            ``right`` (the correction must not spoil what is healthy).
        x: dtype of the input; that of ``dtype`` if left out.
        shape: shape of the input.
        tokens: the input is token ids.
        modules: what ``install`` is told.
        beside: corrections that are needed together with it.
        autocast: dtype of the region around the call.
        stale: dtype of an earlier model that left the shared buffer behind.
        extra: further arguments of the call.
        trains: whether gradients pass through; the path for single new tokens has none.
        counted: whether there is anything to count on a CPU.
    """

    build: Callable[[], nn.Module]
    unit: str
    dtype: str
    fault: str
    x: str = ""
    shape: tuple[int, ...] = (2, 5, 64)
    tokens: bool = False
    modules: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    autocast: str = ""
    stale: str = ""
    extra: Callable[[Tensor], dict[str, Any]] = field(default=lambda x: {})
    trains: bool = True
    counted: bool = True


def llama(x: str, state: str) -> Callable[[], nn.Module]:
    """Builds a fused 4-bit Llama in dtype ``x`` whose quantisation states say ``state``."""
    return lambda: nf4_llama(x, state)


ROWS: Mapping[str, Row] = {
    "keep-float32": Row(
        build=lambda: gemma(mlp_scale=800),
        unit="model.layers.0.mlp",
        dtype="f16",
        fault="wrong",
        modules=("model.layers.0.mlp",),
    ),
    "gemma4-mlp-float32-product": Row(build=gemma, unit="model.layers.0.mlp", dtype="f16", fault="right"),
    "gemma4-rms-norm-float32": Row(build=gemma, unit="model.layers.0.input_layernorm", dtype="f16", fault="right"),
    "gemma4-scaled-embedding-float32": Row(
        build=lambda: gemma(hidden=48),  # its scale, the square root of 48, is rounded in float16
        unit="model.embed_tokens",
        dtype="f16",
        fault="right",
        tokens=True,
        shape=(2, 5),
    ),
    "gemma4-attention-float32": Row(
        build=lambda: gemma(query_scale=0.25),
        unit="model.layers.0.self_attn",
        dtype="f16",
        fault="right",
        extra=rotation_of,
    ),
    "cast-after-dequantize": Row(
        build=llama("bf16", "f16"), unit=LLAMA_MLP, dtype="bf16", fault="raises", beside=("backward-autocast-off",)
    ),
    "float32-adapters": Row(build=narrow_adapters, unit="base_model.model.proj", dtype="bf16", fault="right"),
    "bfloat16-weights": Row(build=gemma, unit="model.layers.0.mlp", dtype="bf16", fault="raises"),
    "quant-state-dtype": Row(build=llama("bf16", "f16"), unit=LLAMA_MLP, dtype="bf16", fault="raises"),
    "backward-autocast-off": Row(
        build=llama("bf16", "f16"), unit=LLAMA_MLP, dtype="bf16", fault="raises", autocast="bf16"
    ),
    "out-of-place-addmm": Row(
        build=llama("bf16", "f16"), unit=LLAMA_MLP, dtype="bf16", fault="raises", autocast="bf16"
    ),
    "decode-in-input-dtype": Row(
        build=llama("bf16", "f16"), unit=LLAMA_MLP, dtype="bf16", fault="raises", shape=(2, 1, 64), trains=False
    ),
    "strict": Row(build=llama("bf16", "bf16"), unit=LLAMA_MLP, dtype="bf16", fault="right"),
    "dequant-buffer-keyed-by-dtype": Row(
        build=llama("bf16", "bf16"), unit=LLAMA_MLP, dtype="bf16", fault="wrong", autocast="bf16", stale="f16"
    ),
    "dequant-no-shared-buffer": Row(
        build=llama("bf16", "bf16"), unit=LLAMA_MLP, dtype="bf16", fault="raises", stale="f16"
    ),
    "dequant-float32-kernel": Row(build=llama("f32", "f32"), unit=LLAMA_MLP, dtype="f32", fault="wrong"),
    "norm-output-cast": Row(build=dense_custom, unit="model.layers.0", dtype="bf16", fault="raises", extra=causal),
    "cast-at-lora-input": Row(
        build=dense_custom, unit="model.layers.0.self_attn.q_proj", dtype="bf16", fault="raises", x="f32"
    ),
    "nf4-custom-op": Row(build=nf4_compiled, unit="layers.0.down_proj", dtype="bf16", fault="right", shape=(2, 5, 96)),
    "nf4-stream-per-call": Row(
        build=nf4_compiled, unit="layers.0.down_proj", dtype="bf16", fault="right", shape=(2, 5, 96), counted=False
    ),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A row's model on a device, and what float32 makes of the same weights and inputs."""

    row: Row
    model: nn.Module
    x: Tensor
    expected: tuple[Tensor, ...]

    @classmethod
    def build(cls, row: Row, device: str) -> "Subject":
        """Draws model and input from fixed seeds."""
        torch.manual_seed(0)
        model = row.build().to(device)
        dtype = DTYPES[row.x or row.dtype]
        x = torch.arange(10).view(row.shape).to(device) if row.tokens else normal(row.shape, 1).to(device, dtype)
        twin = copy.deepcopy(model.get_submodule(row.unit))
        widen(twin)
        return cls(row=row, model=model, x=x, expected=_results(twin, x if row.tokens else x.float(), row))

    def results(self) -> tuple[Tensor, ...]:
        """Output and gradients of the unit as it is now."""
        _leave_a_buffer(self.row.stale, self.x.device)
        autocast = torch.autocast(self.x.device.type, dtype=DTYPES[self.row.autocast]) if self.row.autocast else None
        return _results(self.model.get_submodule(self.row.unit), self.x, self.row, autocast)

    def outcome(self) -> tuple[Tensor, ...] | str:
        """The results, or the message of the error in their place."""
        try:
            return self.results()
        except (RuntimeError, ValueError) as error:
            return str(error)

    def errors(self, results: tuple[Tensor, ...]) -> list[float]:
        """Relative error of each result against float32; infinite where something is not finite."""
        pairs = zip(results, self.expected, strict=True)
        return [relative_error(r, wanted) if torch.isfinite(r).all() else math.inf for r, wanted in pairs]


def _results(
    unit: nn.Module, x: Tensor, row: Row, region: AbstractContextManager[Any] | None = None
) -> tuple[Tensor, ...]:
    """Output of ``unit`` for ``x``, then the gradients of ``x`` and of what is trained for a fixed output gradient."""
    wanted = [] if row.tokens else [x.detach().requires_grad_(row.trains)]
    given = x if row.tokens else wanted[0]
    with torch.set_grad_enabled(row.trains), region or nullcontext():
        out = unit(given, **row.extra(given))
    out = out[0] if isinstance(out, tuple) else out
    if not row.trains:
        return (out,)
    wanted += [p for _, p in sorted(unit.named_parameters()) if p.requires_grad and p.is_floating_point()]
    incoming = normal(out.shape, 2).to(out.device, out.dtype)
    return out.detach(), *torch.autograd.grad(out, wanted, incoming)


def _leave_a_buffer(dtype: str, device: torch.device) -> None:
    """Empties the shared buffers; then, if ``dtype`` is given, dequantises a weight of an earlier model in it."""
    dequantize.BUFFERS.clear()
    if dtype:
        base = packed((128, 64), DTYPES[dtype], 5)
        base.state.to(device)
        dequantize.dequantize(base.weight.to(device), base.state, use_buffer=True)
