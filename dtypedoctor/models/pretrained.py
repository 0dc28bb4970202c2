"""Loads a checkpoint from a folder or the hub's cache, and packs linear layers to 4 bits."""

import os
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.model import Model, Quantization


def load_pretrained(spec: Model, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Any]:
    """The model and its tokenizer; None for the tokenizer where the checkpoint has none, which plain passes do not need.

    A causal language model where transformers has one for the configuration, else the class that the checkpoint names.

    Raises:
        UsageError: it cannot be loaded, or an option does not fit it.
    """
    if spec.outliers:
        raise UsageError(f"{spec.name}: outliers are for builtin models", "Remove `outliers`: real weights need none.")
    arguments: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}, "trust_remote_code": False}
    if spec.attention is not None:
        arguments["attn_implementation"] = spec.attention
    if spec.quantization is not None:
        arguments["quantization_config"] = _bnb_config(spec.quantization, dtype)
    try:
        model = _class_for(AutoConfig.from_pretrained(spec.name, trust_remote_code=False)).from_pretrained(
            spec.name, **arguments
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        place = "folder" if Path(spec.name).exists() else "model id"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") else ""
        raise UsageError(
            f"cannot load the {place} {spec.name!r}: {reason}",
            f"Give builtin:NAME, a folder with config.json and weights, or a hub id that can be reached.{offline}",
        ) from error
    return model, _tokenizer(spec.name)


def _class_for(config: Any) -> Any:
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    named = (config.architectures or [""])[0]
    return getattr(transformers, named, AutoModelForCausalLM)


def _tokenizer(name: str) -> Any:
    """Without its files transformers makes up an empty one for some models, which knows no digit."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    if not tokenizer.decode(tokenizer("12")["input_ids"], skip_special_tokens=True):
        return None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _bnb_config(spec: Quantization, dtype: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=spec.kind,
        bnb_4bit_use_double_quant=spec.nested,
        bnb_4bit_compute_dtype=getattr(torch, spec.compute_dtype) if spec.compute_dtype else dtype,
        llm_int8_skip_modules=list(spec.skip),
    )


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
