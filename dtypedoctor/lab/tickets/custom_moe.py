"""A small decoder in the manner of gpt-oss, written for this package: no library owns its dtypes.

Attention with grouped keys, rotary positions and a learned sink per head; a mixture of experts with top-k routing and a
clamped gated activation (or a plain gated MLP); RMSNorm of either output contract; low-rank updates on the linear layers
that are named. A model is built the way custom models of training frameworks are: construct, cast with exceptions, copy
the checkpoint in, make the dtypes uniform if asked, pack to 4 bits if asked, adapt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

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
from dtypedoctor.lab.models.builtin import VOCABULARY_SIZE
from dtypedoctor.lab.scenarios.model import Quantization


def normalize(x: Tensor, eps: float) -> Tensor:
    """``x`` divided by its root mean square over the last dimension.

    Args:
        x: (..., hidden), any floating dtype.
        eps: added to the mean square.

    Returns:
        (..., hidden) in float32.
    """
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


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
        return self.weight * normalize(x, self.eps).to(x.dtype)


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


ROTARY_BASE = 10000.0
GATE_LIMIT = 7.0
GATE_SLOPE = 1.702


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), halves rotated against each other.

    Args:
        x: (batch, heads, tokens, head_dim); position t is index t of the tokens.

    Returns:
        Same shape and dtype; the angles are computed in float32.
    """
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention whose softmax has one more, learned logit per head, so a row of weights may sum to less than one.

    Args:
        hidden: size of the hidden states.
        heads: number of query heads.
        kv_heads: number of key and value heads; divides ``heads``.
        head_dim: dimension of a head.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.groups = heads // kv_heads
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """Attends.

        Args:
            x: (batch, tokens, hidden).
            allowed: bool, (batch, 1, tokens, tokens); True where the query of a row may see the key of a column.

        Returns:
            (batch, tokens, hidden); scores are normalized in float32 and cast to the dtype of the values.
        """
        query = rotate(self._heads(self.q_proj(x)))
        key = rotate(self._heads(self.k_proj(x))).repeat_interleave(self.groups, dim=1)
        value = self._heads(self.v_proj(x)).repeat_interleave(self.groups, dim=1)
        scores = (query @ key.transpose(-1, -2) * self.head_dim**-0.5).float().masked_fill(~allowed, float("-inf"))
        sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        mixed = weights.to(value.dtype) @ value
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MixtureOfExperts(nn.Module):
    """Each token's output is the weighted sum of its ``top_k`` experts, chosen by a linear router.

    All experts compute all tokens and the others get weight zero: no token is moved, so every op is a dense product.

    Args:
        hidden: size of the hidden states.
        intermediate: inner size of an expert.
        experts: number of experts.
        top_k: experts per token.
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, hidden, 2 * intermediate) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, intermediate, hidden) * intermediate**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to (batch, tokens, hidden); routing weights are normalized in float32."""
        flat = x.flatten(0, 1)
        best, chosen = self.router(flat).topk(self.top_k, dim=-1)
        weights = best.softmax(-1, dtype=torch.float32).to(x.dtype)
        shares = torch.zeros(len(flat), len(self.down_proj), dtype=x.dtype, device=x.device).scatter(
            -1, chosen, weights
        )
        gate, up = (flat @ self.gate_up_proj).chunk(2, dim=-1)
        outputs = clamped_gate(gate, up) @ self.down_proj
        return (outputs * shares.t()[..., None]).sum(0).unflatten(0, x.shape[:2])


def clamped_gate(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's activation: ``gate * sigmoid(1.702 * gate) * (up + 1)`` with gate <= 7 and -7 <= up <= 7."""
    gate = gate.clamp(max=GATE_LIMIT)
    up = up.clamp(-GATE_LIMIT, GATE_LIMIT)
    return gate * torch.sigmoid(GATE_SLOPE * gate) * (up + 1)


class DenseMlp(nn.Module):
    """A gated MLP: ``down(silu(gate(x)) * up(x))``.

    Args:
        hidden: size of the hidden states.
        intermediate: inner size.
    """

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to (..., hidden)."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


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


def cast_to_dtype(model: nn.Module, dtype: torch.dtype, keep_in_fp32: Sequence[str] = ()) -> dict[str, str]:
    """Casts every floating parameter and buffer of ``model`` to ``dtype``, those of kept modules to float32.

    Packed integer storage is left alone.

    Returns:
        Dotted name of each module that holds tensors and was kept, with the entry that kept it.
    """
    kept: dict[str, str] = {}
    for name, module in model.named_modules():
        entry = next((entry for entry in keep_in_fp32 if entry in name), None)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in (tensor for tensor in own if tensor.is_floating_point()):
            tensor.data = tensor.data.to(dtype if entry is None else torch.float32)
            if entry is not None:
                kept[name] = entry
    return kept


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


class DecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, config: CustomMoeConfig) -> None:
        super().__init__()
        norm = NORMS[config.norm]
        self.input_layernorm = norm(config.hidden)
        self.self_attn = Attention(config.hidden, config.heads, config.kv_heads, config.head_dim)
        self.post_attention_layernorm = norm(config.hidden)
        self.mlp: nn.Module = (
            MixtureOfExperts(config.hidden, config.intermediate, config.experts, config.top_k)
            if config.mlp == "moe"
            else DenseMlp(config.hidden, config.intermediate)
        )

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """(batch, tokens, hidden) to (batch, tokens, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), allowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class CustomMoeModel(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, config: CustomMoeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = NORMS[config.norm](config.hidden)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Token ids and mask (1 for real tokens), both (batch, tokens), to hidden states (batch, tokens, hidden)."""
        tokens = input_ids.shape[1]
        allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.norm(x)


class CustomMoeForCausalLM(nn.Module):
    """The model with its head, called as transformers' causal language models are; it cannot ``generate``.

    Attributes:
        config: what it was built from.
        kept_in_fp32: dotted name of each module that the keep list left in float32, with the entry that did.
    """

    def __init__(self, config: CustomMoeConfig) -> None:
        super().__init__()
        self.config = config
        self.kept_in_fp32: Mapping[str, str] = {}
        self.model = CustomMoeModel(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> CausalLMOutput:
        """Predicts the next tokens.

        Args:
            input_ids: (batch, tokens).
            attention_mask: (batch, tokens), 1 for real tokens; all are real if left out.
            labels: (batch, tokens), the input ids themselves, -100 where no loss is wanted.

        Returns:
            ``logits`` of shape (batch, tokens, vocab_size) in the head's dtype; ``loss`` is the mean cross entropy of the
            shifted labels in float32, None without labels.
        """
        logits = self.lm_head(self.model(input_ids, attention_mask))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def build_custom_moe(config: CustomMoeConfig) -> CustomMoeForCausalLM:
    """Builds the model on the CPU, its dtypes final: a later ``.to(dtype)`` would undo the keep list.

    Raises:
        UsageError: no linear layer has the name of one of ``lora_targets``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = CustomMoeForCausalLM(config)
        # Float32 weights to load, with norm weights spread around 1 as trained ones are: rounding ones would cost nothing
        for module in model.modules():
            if isinstance(module, PromotingRMSNorm):
                nn.init.normal_(module.weight, mean=1.0, std=0.1)
        checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.kept_in_fp32 = cast_to_dtype(model, config.dtype, config.keep_in_fp32)
        model.load_state_dict(checkpoint)  # each tensor keeps its dtype
        if config.reconcile != "none":
            honored = config.keep_in_fp32 if config.reconcile == "honour-keep-list" else ()
            model.kept_in_fp32 = cast_to_dtype(model, config.dtype, honored)
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
