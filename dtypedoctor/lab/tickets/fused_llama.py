"""A Llama whose MLP, QKV and O projections run through fused LoRA autograd functions, as the fused training libraries do it.

The corrections at the end swap steps of the kernels for their corrective forms; which of them fixes which failure is for the trials to show.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.nn.functional import silu
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from dtypedoctor.corrections.contract import (
    Counters,
    Installed,
    TargetMismatchError,
    replace_attribute,
    require_signature,
)
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.models.builtin import llama_tiny
from dtypedoctor.lab.tickets import dequantize, fused_lora
from dtypedoctor.lab.tickets.fused_lora import Base


@functools.cache
def for_device(function: type[Function], device_type: str) -> type[Function]:
    """``function`` with the autocast handling of ``device_type`` around its forward and backward pass."""
    members = {
        "forward": staticmethod(custom_fwd(function.forward, device_type=device_type)),
        "backward": staticmethod(custom_bwd(function.backward, device_type=device_type)),
    }
    return type(function.__name__, (function,), members)


class LoraO(Function):
    """One projection. Inputs: X (..., in), its :class:`Base`, A and B (or None); output (..., out)."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, base: Base, A: Tensor | None, B: Tensor | None) -> Tensor:
        """The projection of X."""
        ctx.base = base
        ctx.save_for_backward(X, A, B)
        return fused_lora.lora_matmul(X, base.weight, base.state, A, B, base.scale)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:
        """Gradients of X, A and B."""
        return fused_lora.run_backward(_single_gradients, ctx, dY)


class LoraQkv(Function):
    """Three projections of one input. Inputs: X, three bases, then A and B of each; outputs Q, K and V."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, bases: tuple[Base, ...], *adapters: Tensor | None) -> tuple[Tensor, ...]:
        """Q, K and V of X."""
        ctx.bases = bases
        ctx.save_for_backward(X, *adapters)
        return tuple(
            fused_lora.lora_matmul(X, base.weight, base.state, A, B, base.scale)
            for base, (A, B) in zip(bases, _pairs(adapters), strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of X and of the adapters."""
        return fused_lora.run_backward(_joint_gradients, ctx, *gradients)


class LoraMlp(Function):
    """SwiGLU: ``(silu(gate(X)) * up(X)) → down``. Inputs: X, the bases of gate, up and down, then A and B of each."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, bases: tuple[Base, Base, Base], *adapters: Tensor | None) -> Tensor:
        """The MLP's output for X."""
        gate, up, down = bases
        (gate_A, gate_B), (up_A, up_B), (down_A, down_B) = _pairs(adapters)
        e = fused_lora.lora_matmul(X, gate.weight, gate.state, gate_A, gate_B, gate.scale)
        g = fused_lora.lora_matmul(X, up.weight, up.state, up_A, up_B, up.scale)
        ctx.bases = bases
        ctx.save_for_backward(X, e, g, *adapters)
        return fused_lora.lora_matmul(swiglu(e, g), down.weight, down.state, down_A, down_B, down.scale)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:
        """Gradients of X and of the adapters."""
        return fused_lora.run_backward(_mlp_gradients, ctx, dY)


def swiglu(e: Tensor, g: Tensor) -> Tensor:
    """``silu(e) * g``, computed in float32 and returned in the dtype of ``e``."""
    return (silu(e.float()) * g.float()).to(e.dtype)


def _swiglu_gradients(dh: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``silu(e) * g`` again and the gradients of ``e`` and ``g``, computed in float32, in the dtype of ``dh``."""
    sigmoid = torch.sigmoid(e.float())
    activated = e.float() * sigmoid
    de = dh.float() * g.float() * sigmoid * (1 + e.float() * (1 - sigmoid))
    return (activated * g.float()).to(dh.dtype), de.to(dh.dtype), (dh.float() * activated).to(dh.dtype)


def _single_gradients(ctx: Any, dY: Tensor) -> tuple[Any, ...]:
    X, A, B = ctx.saved_tensors
    dX, adapters = _project_back(X, [dY], [ctx.base], [A, B])
    return dX, None, *adapters


def _joint_gradients(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    X, *adapters = ctx.saved_tensors
    dX, found = _project_back(X, gradients, ctx.bases, adapters)
    return dX, None, *found


def _mlp_gradients(ctx: Any, dY: Tensor) -> tuple[Any, ...]:
    X, e, g, *adapters = ctx.saved_tensors
    *first, down = ctx.bases
    A, B = adapters[-2:]
    rows = dY.reshape(-1, dY.shape[-1])
    weight = fused_lora.backward_weight(down.weight, down.state, dY.dtype, True)
    dh = _input_gradient(None, rows, weight, _like(A, dY), _like(B, dY), down.scale)
    h, de, dg = _swiglu_gradients(dh, _flat(e), _flat(g))
    found = _adapter_gradients(h, rows, _like(A, X), _like(B, X), down.scale)
    dX, others = _project_back(X, [de, dg], first, adapters[:-2])
    return dX, None, *others, *found


def _project_back(
    X: Tensor, gradients: Sequence[Tensor], bases: Sequence[Base], adapters: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradient of the common input X of several projections, and those of their adapters in the order given."""
    found: list[Tensor | None] = []
    dX: Tensor | None = None
    for gradient, base, (A, B) in zip(gradients, bases, _pairs(adapters), strict=True):
        dY = gradient.reshape(-1, gradient.shape[-1])
        A, B = _like(A, X), _like(B, X)
        found += _adapter_gradients(_flat(X), dY, A, B, base.scale)
        weight = fused_lora.backward_weight(base.weight, base.state, X.dtype, False)
        dX = _input_gradient(dX, dY, weight, A, B, base.scale)
    assert dX is not None
    return dX.view(X.shape), found


def _input_gradient(
    dX: Tensor | None, dY: Tensor, weight: Tensor, A: Tensor | None, B: Tensor | None, s: float
) -> Tensor:
    """``dX + dY W + s (dY B) A``; the first product makes the sum, the others are added to it."""
    dX = torch.matmul(dY, weight) if dX is None else fused_lora.accumulate(dX, dY, weight)
    if A is None or B is None:
        return dX
    return fused_lora.accumulate(dX, torch.matmul(dY, B), A, alpha=s)


def _adapter_gradients(
    X: Tensor, dY: Tensor, A: Tensor | None, B: Tensor | None, s: float
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of A and B, each filled into a buffer of the adapter's dtype (``beta=0``: what it held is ignored)."""
    if A is None or B is None:
        return None, None
    dA = fused_lora.accumulate(torch.empty_like(A.t()), X.t(), torch.matmul(dY, B), alpha=s, beta=0)
    dB = fused_lora.accumulate(torch.empty_like(B.t()), torch.matmul(A, X.t()), dY, alpha=s, beta=0)
    return dA.t(), dB.t()


def _pairs(adapters: Sequence[Tensor | None]) -> list[tuple[Tensor | None, Tensor | None]]:
    return list(zip(adapters[::2], adapters[1::2], strict=True))


def _like(adapter: Tensor | None, other: Tensor) -> Tensor | None:
    return None if adapter is None else adapter.to(other.dtype)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


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
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``LlamaAttention.forward`` through :class:`LoraQkv` and :class:`LoraO`; shapes (batch, tokens, hidden).

    The KV cache is called ``cache`` since transformers 5.24, ``past_key_values`` before.
    """
    cache = past_key_values if cache is None else cache
    tokens = hidden_states.shape[:-1]
    query, key, value = (
        heads.view(*tokens, -1, self.head_dim).transpose(1, 2) for heads in _query_key_value(self, hidden_states)
    )
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
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
    active = [name for name in module.active_adapters if name in module.lora_A]
    plain = len(active) == 1 and isinstance(module.lora_dropout[active[0]], nn.Identity)
    if not plain or active[0] in module.lora_variant:
        raise UsageError(
            "the fused projections take one plain LoRA adapter", "Remove dropout, DoRA and further adapters."
        )
    name = str(active[0])
    base = Base(weight=weight.data, state=state, scale=float(module.scaling[name]))
    return base, module.lora_A[name].weight, module.lora_B[name].weight


def is_fused(module: nn.Module) -> bool:
    """Whether ``module`` itself runs one of the forward methods of this file."""
    method = getattr(module.__dict__.get("forward"), "__func__", None)
    return method in (mlp_forward, attention_forward)


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


def swapping(kernels: ModuleType, **steps: Callable[..., Any]) -> Callable[[nn.Module, Sequence[str]], Installed]:
    """An ``install`` that puts each corrective function in the place of the step of ``kernels`` that it is named for.

    Either all of them are in place or none; each call of one counts as a hit. The ``install`` raises
    :class:`TargetMismatchError` where no module of the model runs through the fused kernels, a step does not take the
    same parameters as its corrective form, or another correction is already in its place.
    """

    def install(model: nn.Module, modules: Sequence[str]) -> Installed:
        counters = Counters()
        parts: list[Installed] = []
        try:
            for name, corrective in steps.items():
                parts.append(_swap_step(model, kernels, name, corrective, counters))
        except TargetMismatchError:
            _undo(parts)
            raise
        return Installed(
            target=", ".join(part.target for part in parts),
            proof="; ".join(part.proof for part in parts),
            undo=lambda: _undo(parts),
            counters=counters,
        )

    return install


def _undo(parts: Sequence[Installed]) -> None:
    for part in parts:
        part.undo()


def _swap_step(
    model: nn.Module, module: ModuleType, name: str, corrective: Callable[..., Any], counters: Counters
) -> Installed:
    if not any(is_fused(part) for part in model.modules()):
        raise TargetMismatchError(f"no module of {type(model).__name__} runs through the fused LoRA kernels")
    label = f"{module.__name__}.{name}"
    present = getattr(module, name)
    if hasattr(present, "__wrapped__"):
        raise TargetMismatchError(f"{label} was already replaced by {present.__wrapped__.__name__}")
    require_signature(present, list(inspect.signature(corrective).parameters), label)

    @functools.wraps(corrective)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counters.hit()
        return corrective(*args, **kwargs)

    return replace_attribute(module, name, counted, counters)


install_cast_after_dequantize = swapping(fused_lora, lora_matmul=fused_lora.lora_matmul_cast_after_dequantize)

install_backward_autocast_off = swapping(
    fused_lora,
    run_backward=fused_lora.run_backward_without_autocast,
    backward_weight=fused_lora.backward_weight_cast,
)

install_out_of_place_addmm = swapping(fused_lora, accumulate=fused_lora.accumulate_out_of_place)

install_decode_in_input_dtype = swapping(fused_lora, decode_linear=fused_lora.decode_linear_in_input_dtype)

install_strict = swapping(
    fused_lora,
    dense_weight=fused_lora.strict_dense_weight,
    packed_gemv=fused_lora.strict_packed_gemv,
)

install_dequant_buffer_keyed_by_dtype = swapping(dequantize, shared_buffer=dequantize.buffer_by_device_and_dtype)

install_dequant_no_shared_buffer = swapping(dequantize, shared_buffer=dequantize.buffer_of_its_own)

install_dequant_float32_kernel = swapping(dequantize, choose_kernel=dequantize.kernel_of_state_dtype)
