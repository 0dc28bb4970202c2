"""Forward methods of a Llama whose projections run through the fused LoRA functions.

They take the place of ``LlamaMLP.forward`` and ``LlamaAttention.forward`` on single modules, as the fused libraries do, so
the modules ``q_proj``, ``gate_proj`` and so on hold the weights but are never called.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from dtypedoctor.errors import UsageError
from dtypedoctor.tickets.fused_llama import fused_lora
from dtypedoctor.tickets.fused_llama.fused_lora import Base
from dtypedoctor.tickets.fused_llama.lora_functions import LoraMlp, LoraO, LoraQkv, for_device, swiglu

Projection = tuple[Base, Tensor | None, Tensor | None]


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """``LlamaMLP.forward`` through :class:`LoraMlp`; shapes (batch, tokens, hidden)."""
    gate, up, down = (projection(module) for module in (self.gate_proj, self.up_proj, self.down_proj))
    if _is_decoding(self, x):
        h = swiglu(fused_lora.decode_linear(x, *gate), fused_lora.decode_linear(x, *up))
        return fused_lora.decode_linear(h, *down)
    bases = (gate[0], up[0], down[0])
    return for_device(LoraMlp, x.device.type).apply(x, bases, *gate[1:], *up[1:], *down[1:])


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``LlamaAttention.forward`` through :class:`LoraQkv` and :class:`LoraO`; shapes (batch, tokens, hidden)."""
    tokens = hidden_states.shape[:-1]
    query, key, value = (
        heads.view(*tokens, -1, self.head_dim).transpose(1, 2) for heads in _query_key_value(self, hidden_states)
    )
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    dropout = self.attention_dropout if self.training else 0.0
    mixed, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    return _output(self, mixed.reshape(*tokens, -1)), weights


def _query_key_value(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    parts = [projection(module) for module in (self.q_proj, self.k_proj, self.v_proj)]
    if _is_decoding(self, x):
        return tuple(fused_lora.decode_linear(x, *part) for part in parts)
    adapters = [adapter for part in parts for adapter in part[1:]]
    return for_device(LoraQkv, x.device.type).apply(x, tuple(part[0] for part in parts), *adapters)


def _output(self: Any, x: Tensor) -> Tensor:
    base, A, B = projection(self.o_proj)
    if _is_decoding(self, x):
        return fused_lora.decode_linear(x, base, A, B)
    return for_device(LoraO, x.device.type).apply(x, base, A, B)


def _is_decoding(module: nn.Module, x: Tensor) -> bool:
    return x.shape[1] == 1 and not torch.is_grad_enabled() and getattr(module, "fused_decode", True)


def projection(module: Any) -> Projection:
    """The frozen weight and the active LoRA adapter of a linear layer, with or without peft's wrapper around it.

    Raises:
        UsageError: the layer has a bias, DoRA, dropout, or several active adapters: the fused functions have no place
            for them.
    """
    linear = getattr(module, "base_layer", module)
    if linear.bias is not None:
        raise UsageError("the fused projections take no bias", "Build the model without `attention_bias`/`mlp_bias`.")
    weight = linear.weight
    state = getattr(weight, "quant_state", None)
    if linear is module or module.disable_adapters or module.merged:
        return Base(weight=weight.data, state=state), None, None
    name = _only_adapter(module)
    base = Base(weight=weight.data, state=state, scale=float(module.scaling[name]))
    return base, module.lora_A[name].weight, module.lora_B[name].weight


def _only_adapter(module: Any) -> str:
    active = [name for name in module.active_adapters if name in module.lora_A]
    plain = len(active) == 1 and isinstance(module.lora_dropout[active[0]], nn.Identity)
    if not plain or active[0] in module.lora_variant:
        raise UsageError(
            "the fused projections take one plain LoRA adapter", "Remove dropout, DoRA and further adapters."
        )
    return str(active[0])


def is_fused(module: nn.Module) -> bool:
    """Whether ``module`` itself runs one of the forward methods of this file."""
    method = getattr(module.__dict__.get("forward"), "__func__", None)
    return method in (mlp_forward, attention_forward)
