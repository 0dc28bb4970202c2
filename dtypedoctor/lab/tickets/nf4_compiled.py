"""A small decoder in NF4 with low-rank updates whose weights come through the ctypes fast path, made to be compiled; its corrections.

Its layers differ in the width of keys, values and MLP, as those of models with per-layer widths do, so a compiler that has
to compile layer by layer meets many shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from dtypedoctor._torch_private import schema_of
from dtypedoctor.corrections.contract import (
    Counters,
    Installed,
    TargetMismatchError,
    replace_attribute,
    require_signature,
)
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.models.builtin import VOCABULARY_SIZE
from dtypedoctor.lab.tickets import nf4_ctypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4CompiledConfig:
    """What to build.

    Attributes:
        dtype: dtype of everything that is not packed, and of the quantization states.
        kv_sizes: width of keys and values of each layer; each divides ``hidden``.
        intermediate_sizes: inner size of each layer's MLP.
        nested: whether the statistics are packed too.
        seed: seed of the weights.
    """

    dtype: torch.dtype = torch.bfloat16
    hidden: int = 64
    kv_sizes: Sequence[int] = (32, 64, 16)
    intermediate_sizes: Sequence[int] = (96, 128, 192)
    lora_rank: int = 4
    nested: bool = True
    vocab_size: int = VOCABULARY_SIZE
    seed: int = 3407

    def __post_init__(self) -> None:
        if len(self.kv_sizes) != len(self.intermediate_sizes) or any(self.hidden % size for size in self.kv_sizes):
            raise UsageError(
                f"nf4-compiled: kv_sizes {list(self.kv_sizes)}, intermediate_sizes {list(self.intermediate_sizes)}",
                f"Give one of each per layer, kv_sizes that divide hidden ({self.hidden}).",
            )


class Nf4LoraLinear(nn.Module):
    """``y = x W + scale * (x A) B`` with W packed to NF4 and A, B trained.

    Args:
        in_features, out_features: sizes.
        rank: inner dimension of the update.
        nested: pack the statistics too.
        dtype: dtype of the quantization state and of the update.
    """

    def __init__(self, in_features: int, out_features: int, *, rank: int, nested: bool, dtype: torch.dtype) -> None:
        super().__init__()
        dense = torch.randn(out_features, in_features).mul_(in_features**-0.5).to(dtype)
        packed = bnb.nn.Params4bit(dense, requires_grad=False, compress_statistics=nested, quant_type="nf4")
        self.weight = packed.to("cpu")  # packs
        self.lora_a = nn.Parameter(torch.randn(in_features, rank).mul_(in_features**-0.5).to(dtype))
        self.lora_b = nn.Parameter(torch.zeros(rank, out_features, dtype=dtype))
        self.scale = 16.0 / rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        dense = nf4_ctypes.dequantize(self.weight.t(), self.weight.quant_state)
        return x @ dense + (x @ self.lora_a) @ self.lora_b * self.scale


class Nf4Layer(nn.Module):
    """Norm, attention with one head, residual; norm, gated MLP, residual."""

    def __init__(self, config: Nf4CompiledConfig, kv_size: int, intermediate: int) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> Nf4LoraLinear:
            return Nf4LoraLinear(inputs, outputs, rank=config.lora_rank, nested=config.nested, dtype=config.dtype)

        hidden = config.hidden
        self.input_layernorm = nn.RMSNorm(hidden, dtype=config.dtype).requires_grad_(False)
        self.q_proj = linear(hidden, hidden)
        self.k_proj = linear(hidden, kv_size)
        self.v_proj = linear(hidden, kv_size)
        self.o_proj = linear(hidden, hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, dtype=config.dtype).requires_grad_(False)
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to (batch, tokens, hidden)."""
        normed = self.input_layernorm(x)
        query, key, value = self.q_proj(normed), self.k_proj(normed), self.v_proj(normed)
        repeats = query.shape[-1] // key.shape[-1]
        key, value = key.repeat(1, 1, repeats), value.repeat(1, 1, repeats)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o_proj(mixed)
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Nf4CompiledForCausalLM(nn.Module):
    """Embedding, layers, head; called as transformers' causal language models are."""

    def __init__(self, config: Nf4CompiledConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden, dtype=config.dtype).requires_grad_(False)
        self.layers = nn.ModuleList(
            Nf4Layer(config, kv, inner) for kv, inner in zip(config.kv_sizes, config.intermediate_sizes, strict=True)
        )
        self.norm = nn.RMSNorm(config.hidden, dtype=config.dtype).requires_grad_(False)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False, dtype=config.dtype).requires_grad_(False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> CausalLMOutput:
        """Predicts the next tokens of (batch, tokens) ids; every token is taken as real, whatever the mask says.

        Returns:
            ``logits`` of shape (batch, tokens, vocab_size); ``loss`` in float32, None without labels.
        """
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def build_nf4_compiled(config: Nf4CompiledConfig) -> Nf4CompiledForCausalLM:
    """Builds the model on the CPU, packed and adapted, its dtypes final."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Nf4CompiledForCausalLM(config)


def nf4_compiled(*, dtype: torch.dtype, seed: int, **options: Any) -> nn.Module:
    """The NF4 decoder that is made to be compiled; see :class:`Nf4CompiledConfig` for the options."""
    return build_nf4_compiled(Nf4CompiledConfig(dtype=dtype, seed=seed, **options))


def install_custom_op(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Replaces the fast path by its form that Dynamo sees as one operator; it also asks for the stream at each call.

    The counter ``hits`` counts runs of the operator and of its eager form.

    Raises:
        TargetMismatchError: the model has no NF4 weight, or the fast path is not the one this was written for.
    """
    _require_nf4(model)
    require_signature(nf4_ctypes.dequantize, ("packed", "quant_state"), "nf4_ctypes.dequantize")
    if nf4_ctypes.dequantize is nf4_ctypes.dequantize_compile_safe:
        raise TargetMismatchError("nf4_ctypes.dequantize has been replaced already")
    nf4_ctypes.register_operator()
    counters = Counters()
    notify = counters.hit
    installed = replace_attribute(nf4_ctypes, "dequantize", nf4_ctypes.dequantize_compile_safe, counters)
    nf4_ctypes.launches.append(notify)

    def undo() -> None:
        installed.undo()
        if notify in nf4_ctypes.launches:
            nf4_ctypes.launches.remove(notify)

    schema = schema_of(torch.ops.dtypedoctor.nf4_dequantize.default)
    return replace(installed, undo=undo, proof=f"{installed.proof}; registered as {schema.name}")


def install_stream_per_call(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Replaces the stream that the process found first by the stream that is current at each call.

    Only launches on CUDA ask for a stream, so ``hits`` stays 0 on a CPU.

    Raises:
        TargetMismatchError: the model has no NF4 weight, or the function is not the one this was written for.
    """
    _require_nf4(model)
    require_signature(nf4_ctypes.launch_stream, ("device",), "nf4_ctypes.launch_stream")
    counters = Counters()

    def launch_stream(device: torch.device) -> object:
        counters.hit()
        return nf4_ctypes.current_stream(device)

    return replace_attribute(nf4_ctypes, "launch_stream", launch_stream, counters)


def _require_nf4(model: nn.Module) -> None:
    kinds = {getattr(getattr(p, "quant_state", None), "quant_type", None) for p in model.parameters()}
    if "nf4" not in kinds:
        raise TargetMismatchError(f"{type(model).__name__} has no NF4 weight")
