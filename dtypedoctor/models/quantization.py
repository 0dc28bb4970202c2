"""Packs the linear layers of a model into bitsandbytes' 4-bit format, on a CPU as on a GPU."""

import bitsandbytes as bnb
import torch
from torch import nn

from dtypedoctor.scenario.model import Quantization


def quantize_linears(model: nn.Module, spec: Quantization, dtype: torch.dtype) -> None:
    """Replaces every ``nn.Linear`` of ``model`` in place, except those that ``spec.skip`` names.

    Args:
        model: a model in ``dtype``.
        spec: what to pack and how.
        dtype: the model's dtype, taken where the specification leaves one open.
    """
    compute = getattr(torch, spec.compute_dtype) if spec.compute_dtype else dtype
    stored = getattr(torch, spec.quant_state_dtype) if spec.quant_state_dtype else dtype
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not any(part in spec.skip for part in name.split(".")):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _packed(module, spec, compute, stored))


def _packed(linear: nn.Linear, spec: Quantization, compute: torch.dtype, stored: torch.dtype) -> nn.Module:
    packed = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute,
        compress_statistics=spec.nested,
        quant_type=spec.kind,
        device="meta",
    )
    weight = bnb.nn.Params4bit(
        linear.weight.data.to(stored), requires_grad=False, compress_statistics=spec.nested, quant_type=spec.kind
    )
    packed.weight = weight.to(linear.weight.device)
    # else one eval-mode forward on such a CPU reorders the bytes for good, and training then loses its gradients silently
    packed.support_avx512bf16_for_cpu = False
    if linear.bias is not None:
        packed.bias = nn.Parameter(linear.bias.data, requires_grad=False)
    return packed
