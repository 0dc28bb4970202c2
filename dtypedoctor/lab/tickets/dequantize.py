"""Packed 4-bit weights back to floating point through a buffer that a whole process shares.

Two steps of :func:`dequantize` are named functions, each with its faulty form first and its corrective forms after it;
a correction replaces the faulty name in this module:

* :func:`shared_buffer` finds the memory. The faulty form looks at device and size only, so a second model is handed the
  dtype of the first (public description: https://github.com/unslothai/unsloth/pull/4026).
* :func:`choose_kernel` picks the kernel. The faulty form knows two 16-bit kernels, so a float32 quantization state gets the
  bfloat16 one (public description: https://github.com/axolotl-ai-cloud/axolotl/pull/3799).

A kernel writes the bit patterns of its own format to an address; what the memory is typed as does not concern it. That is
reproduced here by writing through a view of the memory in the kernel's format.
"""

import copy
from math import prod

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch import Tensor

BUFFERS: dict[object, Tensor] = {}
"""The shared buffers, flat, one per key of the form of :func:`shared_buffer` in use. They live as long as the process."""


def shared_buffer(device: torch.device, dtype: torch.dtype, numel: int) -> Tensor:
    """At least ``numel`` elements of shared memory, flat: one buffer per device, whatever dtype is asked for.

    The result has the dtype that was asked for first on this device.
    """
    held = BUFFERS.get(device)
    return _at_least(device, held.dtype if held is not None else dtype, device, numel)


def buffer_by_device_and_dtype(device: torch.device, dtype: torch.dtype, numel: int) -> Tensor:
    """Corrective form of :func:`shared_buffer`: one buffer per device and dtype."""
    return _at_least((device, dtype), dtype, device, numel)


def buffer_of_its_own(device: torch.device, dtype: torch.dtype, numel: int) -> Tensor:
    """Corrective form of :func:`shared_buffer`: new memory for each call, nothing is shared.

    Zeros stand for what the memory held before, so that the part which a wrong kernel leaves out is the same in each run.
    """
    return torch.zeros(numel, dtype=dtype, device=device)


def _at_least(key: object, dtype: torch.dtype, device: torch.device, numel: int) -> Tensor:
    held = BUFFERS.get(key)
    if held is None or held.numel() < numel:
        held = BUFFERS[key] = buffer_of_its_own(device, dtype, numel)
    return held


def choose_kernel(dtype: torch.dtype) -> torch.dtype:
    """Format of the kernel for a quantization state of ``dtype``: float16 for float16, bfloat16 for everything else."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def kernel_of_state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Corrective form of :func:`choose_kernel`: the kernel of the state's own dtype, float32 included."""
    return dtype


def dequantize(weight: Tensor, state: QuantState | None, *, use_buffer: bool = False) -> Tensor:
    """The dense matrix of a packed weight.

    Args:
        weight: packed bytes of shape (numel / 2, 1); of shape (1, numel / 2) they stand for the transposed matrix, which is
            bitsandbytes' own convention. A dense matrix where ``state`` is None.
        state: the quantization state; its ``dtype`` names the kernel and the dtype asked of the buffer.
        use_buffer: return a view of the shared buffer, which the next call overwrites.

    Returns:
        A matrix of ``state.shape`` (or its transpose) in the dtype of the memory it was written to; ``weight`` itself
        where ``state`` is None.

    Raises:
        RuntimeError: the kernel would write beyond the memory, or the packed bytes were reordered by bitsandbytes for its
            own CPU kernel, which its ``Linear4bit`` does in an eval-mode forward on CPUs with AVX512-BF16.
    """
    if state is None:
        return weight
    if getattr(state, "packing_format_for_cpu", False):
        raise RuntimeError("the packed weight was reordered by an eval-mode forward of Linear4bit on this CPU")
    numel = prod(state.shape)
    allocate = shared_buffer if use_buffer else buffer_of_its_own
    memory = allocate(weight.device, state.dtype, numel)
    _write(weight, state, memory, choose_kernel(state.dtype))
    dense = memory[:numel].view(state.shape)
    return dense.t() if weight.shape[0] == 1 else dense


def _write(weight: Tensor, state: QuantState, memory: Tensor, kernel: torch.dtype) -> None:
    """Runs the kernel of format ``kernel`` on the address of ``memory`` (flat, of any dtype)."""
    numel = prod(state.shape)
    room = memory.numel() * memory.element_size()
    if numel * kernel.itemsize > room:
        raise RuntimeError(f"the {kernel} kernel would write {numel * kernel.itemsize} bytes into a buffer of {room}")
    target = memory.view(kernel)[:numel].view(state.shape)
    typed = copy.copy(state)
    typed.dtype = kernel
    packed = weight.reshape(-1, 1)
    if weight.is_cuda:
        dequantize_4bit(packed, typed, out=target)
    else:
        target.copy_(dequantize_4bit(packed, typed))  # bitsandbytes has no out variant on a CPU
