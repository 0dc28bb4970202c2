"""Fused LoRA projections as autograd functions with hand-written backward passes.

For ``Y = X Wᵀ + s (X Aᵀ) Bᵀ`` and the gradient dY of the loss with respect to Y:

    dX = dY W + s (dY B) A        dAᵀ = s Xᵀ (dY B)        dBᵀ = s (A Xᵀ) dY

The classes below are plain; :func:`for_device` gives the one whose ``custom_fwd`` and ``custom_bwd`` belong to a device type.
``cast_inputs`` is not used, so the forward pass runs in the autocast state of the caller and the backward pass re-enters it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.nn.functional import silu

from dtypedoctor.tickets.fused_llama import fused_lora
from dtypedoctor.tickets.fused_llama.fused_lora import Base


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
