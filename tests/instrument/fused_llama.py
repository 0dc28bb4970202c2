"""Builders for the tests of the fused LoRA kernels: packed projections, their float32 reference, tiny fused models."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from dtypedoctor.corrections.contract import Installed, put_in
from dtypedoctor.lab.models.build import quantize_linears
from dtypedoctor.lab.models.builtin import llama_tiny
from dtypedoctor.lab.scenarios.model import Quantization
from dtypedoctor.lab.tickets.fused_llama import fuse
from dtypedoctor.lab.tickets.fused_lora import Base

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
ROUNDING = {"f16": 2e-3, "bf16": 1.5e-2, "f32": 1e-5}
"""Bound of the relative error against float32 that rounding alone explains, a few units in the last place."""

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
    difference = found.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())


def region(autocast: str) -> AbstractContextManager[Any]:
    """An autocast region on the CPU; ``off`` for none."""
    return nullcontext() if autocast == "off" else torch.autocast("cpu", dtype=DTYPES[autocast])


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
