"""A Llama whose MLP, QKV and O projections run through the fused LoRA functions, as the fused training libraries do it."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from dtypedoctor.errors import UsageError
from dtypedoctor.models.builtin import llama_tiny
from dtypedoctor.tickets.fused_llama.forward import attention_forward, mlp_forward


def fuse(model: nn.Module, *, decode_path: bool = True) -> nn.Module:
    """Puts the fused forward methods on every Llama MLP and attention module of ``model``, in place.

    The weights are looked up at each call, so packing the linear layers or adding LoRA may come before or after.

    Args:
        model: a transformers Llama, bare or inside peft.
        decode_path: whether a single new token without gradients takes its own path (``decode_linear``).

    Returns:
        ``model`` itself.

    Raises:
        UsageError: there is no Llama module in ``model``.
    """
    forwards: dict[type, Callable[..., Any]] = {LlamaMLP: mlp_forward, LlamaAttention: attention_forward}
    targets: list[Any] = [module for module in model.modules() if type(module) in forwards]
    if not targets:
        raise UsageError(f"{type(model).__name__} has no Llama MLP or attention to fuse", "Take a Llama model.")
    for module in targets:
        module.fused_decode = decode_path
        module.forward = MethodType(forwards[type(module)], module)
    return model


def llama_nf4_fused(*, decode_path: bool = True, **sizes: int) -> nn.Module:
    """The Llama of :func:`llama_tiny` whose projections run through the fused LoRA functions, once packed and adapted."""
    return fuse(llama_tiny(**sizes), decode_path=decode_path)
