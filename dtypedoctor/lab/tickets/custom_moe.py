"""A small gpt-oss whose dtypes no library owns.

Its RMSNorm has either output contract, and there are low-rank updates on the linear layers that are named. A model is built the way custom models of training frameworks are: construct, cast with exceptions, copy
the checkpoint in, make the dtypes uniform if asked, pack to 4 bits if asked, adapt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dtypedoctor.corrections.contract import (
    Counters,
    Forward,
    Installed,
    TargetMismatchError,
    named_modules_of,
    wrap_forwards,
)
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.models.build import quantize_linears
from dtypedoctor.lab.models.builtin import SPECIAL_TOKENS, VOCABULARY_SIZE
from dtypedoctor.lab.scenarios.model import Quantization


class PromotingRMSNorm(nn.Module):
    """Returns ``weight * normalized.to(x.dtype)``: type promotion gives the output the wider of the two dtypes.

    Args:
        hidden: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to (..., hidden), in ``torch.promote_types(weight.dtype, x.dtype)``."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class CastingRMSNorm(PromotingRMSNorm):
    """The correction: the same product, cast back to the dtype of the input.

    In a 16-bit dtype of epsilon ``e`` the output is rounded twice, so it differs from float32's by at most ``e`` relatively.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to (..., hidden), in ``x.dtype``."""
        return super().forward(x).to(x.dtype)


class LinearLoRA(nn.Module):
    """Adds a trainable update of rank ``rank`` to a frozen linear layer; no cast anywhere.

    Args:
        base: the layer to adapt, ``nn.Linear`` or a layer of the same interface; it is frozen.
        rank: inner dimension of the update.
        alpha: the update is scaled by ``alpha / rank``.
        dtype: dtype of the update's weights.
    """

    def __init__(self, base: nn.Linear, rank: int, *, alpha: float = 16.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        device = base.weight.device
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features).

        Raises:
            RuntimeError: ``x`` has another dtype than a dense weight it meets, and no autocast region covers the call.
        """
        return self.base(x) + self.lora_b(self.lora_a(x) * self.scale)


def install_cast_at_lora_input(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Casts the input of low-rank adapted linear layers to the dtype of their update; a guard, not a cure of the cause.

    Args:
        model: a model with :class:`LinearLoRA` layers.
        modules: dotted names of the layers that are meant; all if empty.

    Raises:
        TargetMismatchError: the model has no such layer, or a named module is not one.
    """
    if modules:
        targets = named_modules_of(model, list(modules))
        others = [name for name, module in targets.items() if not isinstance(module, LinearLoRA)]
        if others:
            raise TargetMismatchError(f"{', '.join(others)} is not a LinearLoRA")
    else:
        targets = {name: module for name, module in model.named_modules() if isinstance(module, LinearLoRA)}
        if not targets:
            raise TargetMismatchError(f"{type(model).__name__} has no LinearLoRA")
    counters = Counters()
    return wrap_forwards(targets, _casting_input(counters), counters)


def _casting_input(counters: Counters) -> Callable[[nn.Module, Forward], Forward]:
    def wrap(module: nn.Module, original: Forward) -> Forward:
        assert isinstance(module, LinearLoRA)  # the targets were chosen so
        wanted = module.lora_a.weight

        def forward(x: Tensor) -> Tensor:
            if x.dtype != wanted.dtype:
                counters.hit()
            cast: Tensor = original(x.to(wanted.dtype))
            return cast

        return forward

    return wrap


def cast_to_dtype(model: nn.Module, dtype: torch.dtype, keep_in_fp32: Sequence[str] = ()) -> None:
    """Casts every floating parameter of ``model`` to ``dtype``, those of modules whose name has a part of the list in it to float32."""
    for name, module in model.named_modules():
        kept = any(entry in name for entry in keep_in_fp32)
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.float32 if kept else dtype)


GPT_OSS_KEEP_LIST = ("post_attention_layernorm", "input_layernorm", "norm")
"""The list that kept gpt-oss's norms in float32 (public description: https://github.com/NVIDIA-NeMo/Automodel/pull/1633)."""

NORMS: dict[str, type[PromotingRMSNorm]] = {"promoting": PromotingRMSNorm, "casting": CastingRMSNorm}
RECONCILIATIONS = ("none", "honour-keep-list", "ignore-keep-list")
MLPS = ("moe", "dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomMoeConfig:
    """What to build.

    Attributes:
        dtype: dtype of everything that the keep list does not name, and of the low-rank updates.
        norm: output contract of the norms, ``promoting`` or ``casting``.
        keep_in_fp32: a module whose dotted name contains one of these stays in float32.
        reconcile: what happens to the dtypes after the weights were loaded: ``none``, ``honour-keep-list`` or
            ``ignore-keep-list``.
        mlp: ``moe`` or ``dense``.
        lora_rank: rank of the low-rank updates; 0 for none, then every parameter is trained.
        lora_targets: last parts of the names of the linear layers that get one.
        qlora: pack the linear layers to NF4, but for the router and ``lm_head``.
        seed: seed of the weights.
    """

    dtype: torch.dtype = torch.bfloat16
    norm: str = "promoting"
    keep_in_fp32: Sequence[str] = GPT_OSS_KEEP_LIST
    reconcile: str = "none"
    mlp: str = "moe"
    lora_rank: int = 4
    lora_targets: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    qlora: bool = False
    layers: int = 2
    hidden: int = 64
    intermediate: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 4
    top_k: int = 2
    vocab_size: int = VOCABULARY_SIZE
    seed: int = 3407

    def __post_init__(self) -> None:
        for name, value, known in (
            ("norm", self.norm, tuple(NORMS)),
            ("reconcile", self.reconcile, RECONCILIATIONS),
            ("mlp", self.mlp, MLPS),
        ):
            if value not in known:
                raise UsageError(f"custom-moe: {name} is {value!r}", f"Known: {', '.join(known)}.")


def _decoder(config: CustomMoeConfig) -> nn.Module:
    """gpt-oss, or a Llama where the MLP is to be dense, in float32 with random weights and the norms that were asked for."""
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attn_implementation": "eager",
        **SPECIAL_TOKENS,
    }
    model: nn.Module = (
        GptOssForCausalLM(GptOssConfig(num_local_experts=config.experts, num_experts_per_tok=config.top_k, **sizes))
        if config.mlp == "moe"
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    for name, module in list(model.named_modules()):
        if isinstance(module, GptOssRMSNorm | LlamaRMSNorm):
            model.set_submodule(name, NORMS[config.norm](config.hidden))
    return model


def build_custom_moe(config: CustomMoeConfig) -> nn.Module:
    """Builds the model on the CPU, its dtypes final: a later ``.to(dtype)`` would undo the keep list.

    Raises:
        UsageError: no linear layer has the name of one of ``lora_targets``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = _decoder(config)
        # Float32 weights to load, with norm weights spread around 1 as trained ones are: rounding ones would cost nothing
        for module in model.modules():
            if isinstance(module, PromotingRMSNorm):
                nn.init.normal_(module.weight, mean=1.0, std=0.1)
        checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        cast_to_dtype(model, config.dtype, config.keep_in_fp32)
        model.load_state_dict(checkpoint)  # each tensor keeps its dtype
        if config.reconcile != "none":
            cast_to_dtype(model, config.dtype, config.keep_in_fp32 if config.reconcile == "honour-keep-list" else ())
        if config.qlora:
            quantize_linears(model, Quantization(kind="nf4", skip=["lm_head", "router"]), config.dtype)
        if config.lora_rank:
            # Freezes the model and puts low-rank updates on the targets
            model.requires_grad_(False)
            targets = [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2] in config.lora_targets]
            linears = [(n, m) for n, m in targets if isinstance(m, nn.Linear)]
            if not linears:
                raise UsageError(
                    f"custom-moe: no linear layer is named {' or '.join(config.lora_targets)}",
                    "Give e.g. q_proj, lm_head.",
                )
            for name, module in linears:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, LinearLoRA(module, config.lora_rank, dtype=config.dtype))
    return model


def custom_moe(*, dtype: torch.dtype, seed: int, **options: Any) -> nn.Module:
    """The custom decoder; see :class:`CustomMoeConfig` for the options."""
    config = CustomMoeConfig(dtype=dtype, seed=seed, **options)
    model: Any = build_custom_moe(config)
    model._keep_in_fp32_modules = list(config.keep_in_fp32)  # where transformers' own models carry theirs
    return model
