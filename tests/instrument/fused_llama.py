"""Builders for the tests of the fused LoRA kernels: packed projections, their float32 reference, tiny fused models."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import silu

from dtypedoctor.corrections.contract import Installed, put_in
from dtypedoctor.models.build import quantize_linears
from dtypedoctor.models.builtin import llama_tiny
from dtypedoctor.scenario.model import Quantization
from dtypedoctor.tickets.fused_llama.fused_lora import Base
from dtypedoctor.tickets.fused_llama.model import LoraMlp, LoraO, LoraQkv, for_device, fuse

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
ROUNDING = {"f16": 2e-3, "bf16": 1.5e-2, "f32": 1e-5}
"""Bound of the relative error against float32 that rounding alone explains, a few units in the last place."""

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WIDTHS = {"o": [(64, 64)], "qkv": [(64, 64), (32, 64), (32, 64)], "mlp": [(128, 64), (128, 64), (64, 128)]}
FUNCTIONS = {"o": LoraO, "qkv": LoraQkv, "mlp": LoraMlp}


def normal(shape: Sequence[int], seed: int, scale: float = 1.0) -> Tensor:
    """Float32 samples that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def packed(shape: tuple[int, int], dtype: torch.dtype, seed: int, nested: bool = True) -> Base:
    """A matrix in bitsandbytes' NF4 format whose quantisation state says ``dtype``."""
    weight, state = quantize_4bit(normal(shape, seed, 0.05).to(dtype), quant_type="nf4", compress_statistics=nested)
    return Base(weight=weight, state=state, scale=2.0)


def exact(base: Base) -> Tensor:
    """The matrix that packed bytes stand for, in float32."""
    dtype, base.state.dtype = base.state.dtype, torch.float32
    try:
        return dequantize_4bit(base.weight, base.state)
    finally:
        base.state.dtype = dtype


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = found.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())


def region(autocast: str) -> AbstractContextManager[Any]:
    """An autocast region on the CPU; ``off`` for none."""
    return nullcontext() if autocast == "off" else torch.autocast("cpu", dtype=DTYPES[autocast])


def cause(error: BaseException) -> str:
    """The op family and the two dtypes that an error message names; texts differ a little between torch versions."""
    patterns = {
        r"expected m(?:at)?1 and m(?:at)?2 to have the same dtype, but got: (\S+) != (\S+)": "mm",
        r"self and mat2 must have the same dtype, but got (\S+) and (\S+)": "addmm_",
        r"mat1 and mat2 must have the same dtype, but got (\S+) and (\S+)": "addmm_ operands",
    }
    for pattern, family in patterns.items():
        if match := re.search(pattern, str(error)):
            return f"{family} {match[1].removeprefix('c10::')} {match[2].removeprefix('c10::')}"
    return f"{type(error).__name__}: {error}"


@dataclass
class Block:
    """A fused function with everything it needs; ``kind`` is ``o``, ``qkv`` or ``mlp``."""

    kind: str
    X: Tensor
    bases: list[Base]
    adapters: list[Tensor]

    @classmethod
    def build(cls, kind: str, x: str, w: str) -> "Block":
        """X of dtype ``x``, quantisation states of dtype ``w``, adapters in float32."""
        shapes = WIDTHS[kind]
        adapters = [normal(s, 10 + k, 0.1) for k, (o, i) in enumerate(shapes) for s in ((4, i), (o, 4))]
        return cls(
            kind=kind,
            X=normal((2, 5, 64), 1).to(DTYPES[x]).requires_grad_(),
            bases=[packed(shape, DTYPES[w], 20 + k) for k, shape in enumerate(shapes)],
            adapters=[a.requires_grad_() for a in adapters],
        )

    def forward(self) -> list[Tensor]:
        """The outputs of the fused function."""
        bases = self.bases[0] if self.kind == "o" else tuple(self.bases)
        out = for_device(FUNCTIONS[self.kind], "cpu").apply(self.X, bases, *self.adapters)
        return list(out) if isinstance(out, tuple) else [out]

    def backward(self, outputs: list[Tensor]) -> list[Tensor]:
        """Gradients of X and of the adapters for fixed output gradients."""
        gradients = [normal(out.shape, 30 + k).to(out.dtype) for k, out in enumerate(outputs)]
        return list(torch.autograd.grad(outputs, [self.X, *self.adapters], gradients))

    def reference(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients of the same block in float32 by plain autograd."""
        X = self.X.detach().float().requires_grad_()
        adapters = [a.detach().clone().requires_grad_() for a in self.adapters]

        def project(x: Tensor, index: int) -> Tensor:
            A, B = adapters[2 * index : 2 * index + 2]
            base = self.bases[index]
            return x @ exact(base).t() + base.scale * (x @ A.t()) @ B.t()

        if self.kind == "mlp":
            outputs = [project(silu(project(X, 0)) * project(X, 1), 2)]
        else:
            outputs = [project(X, index) for index in range(len(self.bases))]
        gradients = [normal(out.shape, 30 + k) for k, out in enumerate(outputs)]
        return outputs, list(torch.autograd.grad(outputs, [X, *adapters], gradients))


def outcome_of(block: Block, autocast: str) -> str:
    """``ok`` or the cause of the error of a forward pass."""
    try:
        with region(autocast):
            block.forward()
    except RuntimeError as error:
        return cause(error)
    return "ok"


@contextmanager
def corrected(model: nn.Module, *ids: str, modules: Sequence[str] = ()) -> Iterator[list[Installed]]:
    """Installs corrections, each told ``modules``, and takes them out again, last one first."""
    installed: list[Installed] = []
    try:
        for name in ids:
            installed.append(put_in(name, model, modules))
        yield installed
    finally:
        for correction in reversed(installed):
            correction.undo()


def nf4_llama(dtype: str, state: str, targets: Sequence[str] = LINEARS, decode_path: bool = True) -> Any:
    """A tiny fused Llama in NF4 with trained-looking LoRA adapters (B is not zero)."""
    torch.manual_seed(0)
    model = llama_tiny().to(DTYPES[dtype])
    quantize_linears(model, Quantization(quant_state_dtype=NAMES[state]), DTYPES[dtype])
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")
    return fuse(get_peft_model(model, config), decode_path=decode_path)
