"""Corrections of transformers' Gemma-4 text model."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.corrections.contract import (
    Installed,
    TargetMismatchError,
    replace_attribute,
    require_signature,
)
from dtypedoctor.corrections.counters import Counters
from dtypedoctor.tickets.gemma4.attention import attention_float32
from dtypedoctor.tickets.gemma4.float32 import held, rms_norm_float32, scaled_embedding_float32
from dtypedoctor.tickets.gemma4.mlp import gated_mlp_float32_product

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The class that a correction was written for.

    Attributes:
        name: class name in transformers.
        signature: parameter names of its forward.
        parts: attributes that the correction reads.
    """

    name: str
    signature: tuple[str, ...]
    parts: tuple[str, ...]

    def owner(self, model: nn.Module) -> type:
        """The class whose forward the modules of ``model`` run.

        Raises:
            TargetMismatchError: the model has no such module, or it is not the code that this was written for.
        """
        found = next((m for m in model.modules() if self.name in (c.__name__ for c in type(m).__mro__)), None)
        if found is None:
            raise TargetMismatchError(f"{type(model).__name__} has no {self.name}")
        owner = next(c for c in type(found).__mro__ if "forward" in c.__dict__)
        label = f"{owner.__module__}.{owner.__qualname__}"
        require_signature(inspect.unwrap(owner.__dict__["forward"]), self.signature, f"{label}.forward")
        missing = [part for part in self.parts if not hasattr(found, part)]
        if missing:
            raise TargetMismatchError(f"{label} has no {', '.join(missing)}")
        return owner


def _replacing(
    target: _Target, corrected: Callable[[Forward, Counters], Forward]
) -> Callable[[nn.Module, Sequence[str]], Installed]:
    """An ``install`` that gives every instance of the class ``corrected(original forward, counters)`` as its forward."""

    def install(model: nn.Module, modules: Sequence[str]) -> Installed:
        owner = target.owner(model)
        counters = Counters()
        return replace_attribute(owner, "forward", corrected(owner.__dict__["forward"], counters), counters)

    return install


def _mlp(original: Forward, counters: Counters) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        return gated_mlp_float32_product(x, self.gate_proj, self.up_proj, self.down_proj, self.act_fn, counters)

    return forward


def _rms_norm(original: Forward, counters: Counters) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        counters.hit()
        normed = rms_norm_float32(hidden_states, self.weight if self.with_scale else None, self.eps)
        return held(normed, hidden_states.dtype, counters)

    return forward


def _embedding(original: Forward, counters: Counters) -> Forward:
    def forward(self: Any, input_ids: Tensor) -> Tensor:
        return scaled_embedding_float32(input_ids, self.weight, self.embed_scale, self.padding_idx, counters)

    return forward


def _attention(original: Forward, counters: Counters) -> Forward:
    def forward(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None,
                shared_kv_states: Any, past_key_values: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if hidden_states.dtype is not torch.float16:
            return original(
                self, hidden_states, position_embeddings, attention_mask, shared_kv_states, past_key_values, **kwargs
            )
        out = attention_float32(
            self, hidden_states, position_embeddings, attention_mask, shared_kv_states, past_key_values, counters
        )
        return out, None

    return forward


install_mlp_float32_product = _replacing(
    _Target(name="Gemma4TextMLP", signature=("self", "x"), parts=("gate_proj", "up_proj", "down_proj", "act_fn")),
    _mlp,
)

install_rms_norm_float32 = _replacing(
    _Target(name="Gemma4RMSNorm", signature=("self", "hidden_states"), parts=("with_scale", "eps")), _rms_norm
)

install_scaled_embedding_float32 = _replacing(
    _Target(
        name="Gemma4TextScaledWordEmbedding",
        signature=("self", "input_ids"),
        parts=("weight", "embed_scale", "padding_idx"),
    ),
    _embedding,
)

install_attention_float32 = _replacing(
    _Target(
        name="Gemma4TextAttention",
        signature=(
            "self",
            "hidden_states",
            "position_embeddings",
            "attention_mask",
            "shared_kv_states",
            "past_key_values",
            "kwargs",
        ),
        parts=("q_proj", "q_norm", "o_proj", "head_dim", "scaling", "is_kv_shared_layer", "store_full_length_kv"),
    ),
    _attention,
)
