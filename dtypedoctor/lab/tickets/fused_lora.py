"""The steps of fused LoRA projections: each as the fused libraries have it, and beside it the forms that correct it.

A projection computes ``Y = X Wᵀ + s (X Aᵀ) Bᵀ`` with a frozen, mostly packed W of shape (out, in) and the adapters A (r, in)
and B (out, r). The faulty forms follow the public description of https://github.com/unslothai/unsloth/pull/4918 and
https://github.com/unslothai/unsloth/pull/7534: nothing makes the dtypes of X, of the dequantized W and of an active
autocast region agree, and the sums are taken in place, where autocast does not reach.

Other modules call these functions as attributes of this module, so that a correction can replace them one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor

from dtypedoctor.lab.tickets import dequantize


class MixedDtypesError(TypeError):
    """Dtypes that have to agree do not; raised only by the strict forms of this module's functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The frozen part of a projection: W as stored, its quantization state (None for a dense W) and LoRA's scale s."""

    weight: Tensor
    state: QuantState | None
    scale: float = 1.0


def dense_weight(weight: Tensor, state: QuantState | None, dtype: torch.dtype, use_buffer: bool) -> Tensor:
    """W in floating point. ``dtype`` is that of the tensor it will be multiplied with; nobody compares the two."""
    return dequantize.dequantize(weight, state, use_buffer=use_buffer)


def strict_dense_weight(weight: Tensor, state: QuantState | None, dtype: torch.dtype, use_buffer: bool) -> Tensor:
    """Form of :func:`dense_weight` for finding errors that a cast or autocast would hide.

    Raises:
        MixedDtypesError: W was dequantized by a kernel or into a buffer of another dtype than that of its quantization
            state, or this is not the dtype of the activations, or an autocast region of yet another dtype is active.
    """
    dense = dequantize.dequantize(weight, state, use_buffer=use_buffer)
    if state is not None:
        kernel = dequantize.choose_kernel(state.dtype)
        if not kernel == dense.dtype == state.dtype:
            raise MixedDtypesError(f"quant_state is {state.dtype}, its kernel {kernel}, the buffer {dense.dtype}")
    if dense.dtype != dtype:
        raise MixedDtypesError(f"the dequantized weight is {dense.dtype} but the activations are {dtype}")
    device = weight.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype:
        raise MixedDtypesError(f"autocast is {torch.get_autocast_dtype(device)} but the activations are {dtype}")
    return dense


def accumulate(out: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """``beta * out + alpha * left @ right``, written into ``out``: autocast does not touch in-place operations."""
    return out.addmm_(left, right, alpha=alpha, beta=beta)


def accumulate_out_of_place(out: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Corrective form of :func:`accumulate`: a new tensor; inside autocast all operands are cast to its dtype."""
    return torch.addmm(out, left, right, alpha=alpha, beta=beta)


def lora_matmul(
    X: Tensor, W: Tensor, quant_state: QuantState | None, A: Tensor | None, B: Tensor | None, s: float
) -> Tensor:
    """``X Wᵀ + s (X Aᵀ) Bᵀ`` for X of shape (..., in): two products out of place, then one sum in place.

    Returns:
        Shape (..., out). Inside an autocast region the products come in its dtype, while B is cast to that of X.
    """
    dtype = X.dtype
    rows = X.reshape(-1, X.shape[-1])
    weight = dense_weight(W, quant_state, dtype, True)
    out = torch.matmul(rows, weight.t())
    if A is not None and B is not None:
        low = torch.matmul(rows, A.to(dtype).t())
        out = accumulate(out, low, B.to(dtype).t(), alpha=s)
    return out.view(*X.shape[:-1], -1)


def lora_matmul_cast_after_dequantize(
    X: Tensor, W: Tensor, quant_state: QuantState | None, A: Tensor | None, B: Tensor | None, s: float
) -> Tensor:
    """Corrective form of :func:`lora_matmul`: casts the dequantized W and the first product to the dtype of X.

    Inside an autocast region of another dtype ``X Aᵀ`` still comes in that dtype, so the sum still mixes two.
    """
    dtype = X.dtype
    rows = X.reshape(-1, X.shape[-1])
    weight = dense_weight(W, quant_state, dtype, True).to(dtype)
    out = torch.matmul(rows, weight.t()).to(dtype)
    if A is not None and B is not None:
        low = torch.matmul(rows, A.to(dtype).t())
        out = accumulate(out, low, B.to(dtype).t(), alpha=s)
    return out.view(*X.shape[:-1], -1)


def backward_weight(weight: Tensor, state: QuantState | None, dtype: torch.dtype, use_buffer: bool) -> Tensor:
    """W for the backward pass, in whatever dtype it is dequantized to."""
    return dense_weight(weight, state, dtype, use_buffer)


def backward_weight_cast(weight: Tensor, state: QuantState | None, dtype: torch.dtype, use_buffer: bool) -> Tensor:
    """Corrective form of :func:`backward_weight`: cast to ``dtype``, that of the gradient it is multiplied with."""
    return dense_weight(weight, state, dtype, use_buffer).to(dtype)


def run_backward(body: Callable[..., Any], ctx: Any, *gradients: Tensor) -> Any:
    """Runs a hand-written backward pass in the autocast state of its forward pass, which ``custom_bwd`` has re-entered."""
    return body(ctx, *gradients)


def run_backward_without_autocast(body: Callable[..., Any], ctx: Any, *gradients: Tensor) -> Any:
    """Corrective form of :func:`run_backward`: autocast off, the gradients in the dtype of the saved input X.

    X is the first of ``ctx.saved_tensors``. Needs :func:`backward_weight_cast` beside it.
    """
    X = ctx.saved_tensors[0]
    with torch.autocast(X.device.type, enabled=False):
        return body(ctx, *(gradient.to(X.dtype) for gradient in gradients))


def decode_linear(X: Tensor, base: Base, A: Tensor | None, B: Tensor | None) -> Tensor:
    """A projection for one new token, without gradients, into an output of the dtype of X.

    On CUDA a single row goes through :func:`packed_gemv`; otherwise W is dequantized and multiplied with ``out=``, which
    autocast does not touch either.

    Args:
        X: shape (batch, 1, in).
        base: the frozen part.
        A: LoRA's A of shape (r, in), or None.
        B: LoRA's B of shape (out, r), or None.

    Returns:
        Shape (batch, 1, out).
    """
    rows = X.reshape(X.shape[0], -1)
    if base.state is not None and X.is_cuda and len(rows) == 1:
        out = packed_gemv(rows, base.weight, base.state)
    else:
        weight = dense_weight(base.weight, base.state, X.dtype, True)
        out = torch.empty(len(rows), weight.shape[0], dtype=X.dtype, device=X.device)
        torch.matmul(rows, weight.t(), out=out)
    if A is not None and B is not None:
        low = torch.mm(rows, A.to(X.dtype).t())
        out.addmm_(low, B.to(X.dtype).t(), alpha=base.scale)
    return out.unsqueeze(1)


def packed_gemv(row: Tensor, weight: Tensor, state: QuantState) -> Tensor:
    """``row Wᵀ`` on the packed W with the kernel that the quantization state names, whatever the row's dtype is.

    Like the real call, which hands over addresses, the kernel reads and writes memory of another 16-bit format as its own.

    Args:
        row: shape (1, in), on CUDA.
        weight: the packed bytes of W.
        state: its quantization state.

    Returns:
        Shape (1, out), typed as ``row``.
    """
    return _run_gemv(row, weight, state, dequantize.choose_kernel(state.dtype))


def strict_packed_gemv(row: Tensor, weight: Tensor, state: QuantState) -> Tensor:
    """Form of :func:`packed_gemv` for finding errors.

    Raises:
        MixedDtypesError: the kernel is not that of the state's dtype, or not that of the activations.
    """
    kernel = dequantize.choose_kernel(state.dtype)
    if not kernel == state.dtype == row.dtype:
        raise MixedDtypesError(f"quant_state is {state.dtype}, its kernel {kernel}, the activations are {row.dtype}")
    return _run_gemv(row, weight, state, kernel)


def _run_gemv(row: Tensor, weight: Tensor, state: QuantState, kernel: torch.dtype) -> Tensor:
    rows, columns = state.shape
    out = torch.empty(1, rows, dtype=row.dtype, device=row.device)
    absmax = state.absmax
    if state.nested:
        inner = state.state2
        absmax = state.offset + torch.ops.bitsandbytes.dequantize_blockwise(
            absmax, inner.absmax, inner.code, inner.blocksize, torch.float32
        )
    seen, written = row.view(kernel)[:, :columns], out.view(kernel)[:, :rows]
    torch.ops.bitsandbytes.gemv_4bit.out(seen, weight, state.shape, absmax, state.code, state.blocksize, out=written)
    return out


def decode_linear_in_input_dtype(X: Tensor, base: Base, A: Tensor | None, B: Tensor | None) -> Tensor:
    """Corrective form of :func:`decode_linear`: everything in the dtype of X, autocast off, no packed kernel."""
    with torch.autocast(X.device.type, enabled=False):
        return lora_matmul_cast_after_dequantize(X, base.weight, base.state, A, B, base.scale)
