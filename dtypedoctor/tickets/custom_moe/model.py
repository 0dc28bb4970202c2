"""A small decoder in the manner of gpt-oss, written for this package: no library owns its dtypes.

Attention with grouped keys, rotary positions and a learned sink per head; a mixture of experts with top-k routing and a
clamped gated activation (or a plain gated MLP); RMSNorm of either output contract; low-rank updates on the linear layers
that are named. A model is built the way custom models of training frameworks are: construct, cast with exceptions, copy
the checkpoint in, make the dtypes uniform if asked, pack to 4 bits if asked, adapt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from dtypedoctor.errors import UsageError
from dtypedoctor.models.build import quantize_linears
from dtypedoctor.models.builtin import VOCABULARY_SIZE
from dtypedoctor.scenario.model import Quantization
from dtypedoctor.tickets.custom_moe.layers import (
    Attention,
    CastingRMSNorm,
    DenseMlp,
    LinearLoRA,
    MixtureOfExperts,
    PromotingRMSNorm,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What :func:`reconcile_dtypes` changed.

    Attributes:
        changed: dotted tensor name to the dtype it had.
        kept: dotted module name to the entry of the keep list because of which the module was left alone.
        rounding: dotted tensor name to the largest relative change of an element; the cost of the cast.
    """

    changed: Mapping[str, str]
    kept: Mapping[str, str]
    rounding: Mapping[str, float] = field(default_factory=dict)


def keeper(module_name: str, keep_in_fp32: Sequence[str]) -> str | None:
    """The first entry of the list that is contained in the dotted name, or None."""
    return next((entry for entry in keep_in_fp32 if entry in module_name), None)


def cast_to_dtype(model: nn.Module, dtype: torch.dtype, keep_in_fp32: Sequence[str] = ()) -> dict[str, str]:
    """Casts every floating parameter and buffer of ``model`` to ``dtype``, those of kept modules to float32.

    Packed integer storage is left alone.

    Returns:
        Dotted name of each module that holds tensors and was kept, with the entry that kept it.
    """
    kept: dict[str, str] = {}
    for name, tensors in _holders(model):
        entry = keeper(name, keep_in_fp32)
        if entry is not None:
            kept[name] = entry
        for tensor in tensors.values():
            tensor.data = tensor.data.to(dtype if entry is None else torch.float32)
    return kept


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies ``weights`` into the tensors that ``model`` has; each keeps its dtype, so the dtypes follow the model.

    Raises:
        UsageError: a tensor is missing, left over or of another shape.
    """
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    wrong = sorted(held.keys() ^ weights.keys())
    wrong += [name for name in held.keys() & weights.keys() if held[name].shape != weights[name].shape]
    if wrong:
        raise UsageError(
            f"the weights do not fit the model: {', '.join(wrong[:5])}",
            "Missing, left over or of another shape; build the model with the settings of the checkpoint.",
        )
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(weights[name])


def reconcile_dtypes(model: nn.Module, dtype: torch.dtype, keep_in_fp32: Sequence[str] = ()) -> Reconciled:
    """Casts what is not in ``dtype``, except kept modules; an empty list is the form that ignores the model's own.

    Meant for after a checkpoint was loaded, when dtypes may differ from tensor to tensor.
    """
    changed: dict[str, str] = {}
    kept: dict[str, str] = {}
    rounding: dict[str, float] = {}
    for name, tensors in _holders(model):
        entry = keeper(name, keep_in_fp32)
        if entry is not None:
            kept[name] = entry
            continue
        for leaf, tensor in tensors.items():
            if tensor.dtype != dtype:
                full = f"{name}.{leaf}" if name else leaf
                changed[full] = str(tensor.dtype).removeprefix("torch.")
                rounding[full] = _largest_relative_change(tensor.data, dtype)
                tensor.data = tensor.data.to(dtype)
    return Reconciled(changed=changed, kept=kept, rounding=rounding)


def _holders(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Modules that directly hold floating tensors: dotted name, its tensors by their own names."""
    for name, module in model.named_modules():
        tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        floating = {leaf: tensor for leaf, tensor in tensors.items() if tensor.is_floating_point()}
        if floating:
            yield name, floating


def _largest_relative_change(tensor: Tensor, dtype: torch.dtype) -> float:
    wide = tensor.double()
    change = (tensor.to(dtype).double() - wide).abs() / wide.abs().clamp_min(torch.finfo(torch.float64).tiny)
    return float(change.max()) if change.numel() else 0.0


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
        reconciled: what making the dtypes uniform changed; None where that was not asked for.
    """

    def __init__(self, config: CustomMoeConfig) -> None:
        super().__init__()
        self.config = config
        self.kept_in_fp32: Mapping[str, str] = {}
        self.reconciled: Reconciled | None = None
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
        checkpoint = _trained_weights(model)
        model.kept_in_fp32 = cast_to_dtype(model, config.dtype, config.keep_in_fp32)
        load_weights(model, checkpoint)
        if config.reconcile != "none":
            honoured = config.keep_in_fp32 if config.reconcile == "honour-keep-list" else ()
            model.reconciled = reconcile_dtypes(model, config.dtype, honoured)
            model.kept_in_fp32 = model.reconciled.kept
        if config.qlora:
            quantize_linears(model, Quantization(kind="nf4", skip=["lm_head", "router"]), config.dtype)
        if config.lora_rank:
            _adapt(model, config)
    return model


def _trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Float32 weights to load, with norm weights spread around 1 as trained ones are: rounding ones would cost nothing."""
    for module in model.modules():
        if isinstance(module, PromotingRMSNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _adapt(model: nn.Module, config: CustomMoeConfig) -> None:
    """Freezes the model and puts low-rank updates on the targets."""
    model.requires_grad_(False)
    targets = [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2] in config.lora_targets]
    linears = [(n, m) for n, m in targets if isinstance(m, nn.Linear)]
    if not linears:
        raise UsageError(
            f"custom-moe: no linear layer is named {' or '.join(config.lora_targets)}", "Give e.g. q_proj, lm_head."
        )
    for name, module in linears:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LinearLoRA(module, config.lora_rank, dtype=config.dtype))


def custom_moe(*, dtype: torch.dtype, seed: int, **options: Any) -> nn.Module:
    """The custom decoder; see :class:`CustomMoeConfig` for the options."""
    config = CustomMoeConfig(dtype=dtype, seed=seed, **options)
    model: Any = build_custom_moe(config)
    model._keep_in_fp32_modules = list(config.keep_in_fp32)  # where transformers' own models carry theirs
    return model
