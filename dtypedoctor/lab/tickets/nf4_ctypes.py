"""NF4 weights back to floating point by calling bitsandbytes' C functions directly, without its Python layer.

Two things are wrong with :func:`dequantize`, the fast path, and each has its corrective form beside it:

* Dynamo cannot trace it. ``torch.compile`` breaks the graph at each ctypes value and call, compiles the pieces and the
  helpers in between one by one, and gives up on them at its recompile limit. :func:`dequantize_compile_safe` runs the same
  code as an operator that Dynamo does not look into.
* On CUDA it launches on the stream that was current when the process first came here (:func:`launch_stream`), whatever
  stream or device is current now. :func:`current_stream` asks anew at each call.

Public description of both: https://github.com/thad0ctor/axolotl/pull/25.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from bitsandbytes.cextension import lib
from bitsandbytes.functional import QuantState, get_ptr
from torch import Tensor

NF4_FUNCTIONS: Mapping[str, Mapping[torch.dtype, Any]] = {
    "cpu": {
        torch.float16: lib.cdequantize_blockwise_cpu_nf4_fp16,
        torch.bfloat16: lib.cdequantize_blockwise_cpu_nf4_bf16,
        torch.float32: lib.cdequantize_blockwise_cpu_nf4_fp32,
    },
    "cuda": {
        torch.float16: lib.cdequantize_blockwise_fp16_nf4,
        torch.bfloat16: lib.cdequantize_blockwise_bf16_nf4,
        torch.float32: lib.cdequantize_blockwise_fp32_nf4,
    },
}
"""C functions by device type and output dtype; where the library has none for a device, one that raises when called."""

STATISTICS_FUNCTIONS: Mapping[str, Any] = {
    "cpu": lib.cdequantize_blockwise_cpu_fp32,
    "cuda": lib.cdequantize_blockwise_fp32,
}
"""C functions that bring 8-bit statistics back to float32."""

CPU_BLOCKSIZE_LIMIT = 2048
"""From this block size on bitsandbytes itself does not use its CPU function, for its rounding errors."""

OPERATOR = "dtypedoctor::nf4_dequantize"

launches: list[Callable[[], None]] = []
"""Called at each run of the corrected form, compiled or not; for counting."""

Stream = Callable[[torch.device], ctypes.c_void_p]

_process_stream: Any = None


def launch_stream(device: torch.device) -> ctypes.c_void_p:
    """Handle of the CUDA stream that was current at the process's first call, on whatever device that was."""
    global _process_stream
    if _process_stream is None:
        _process_stream = torch.cuda.current_stream(device)
    return ctypes.c_void_p(_process_stream.cuda_stream)


def current_stream(device: torch.device) -> ctypes.c_void_p:
    """Corrective form of :func:`launch_stream`: handle of the stream that is current on ``device`` now."""
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def dequantize(packed: Tensor, quant_state: QuantState) -> Tensor:
    """The dense matrix of an NF4 weight.

    Args:
        packed: packed bytes of shape (numel / 2, 1); of shape (1, numel / 2) they stand for the transposed matrix, which is
            bitsandbytes' own convention.
        quant_state: quantization state of the weight, its statistics nested or not.

    Returns:
        A matrix of ``quant_state.shape`` (or its transpose) in ``quant_state.dtype``, bit for bit that of
        ``bitsandbytes.functional.dequantize_4bit``.

    Raises:
        ValueError: the state is not one that the C functions can read.
    """
    check(packed, quant_state)
    out = run_kernels(packed, *_parts(quant_state), launch_stream)
    return out.t() if packed.shape[0] == 1 else out


def dequantize_compile_safe(packed: Tensor, quant_state: QuantState) -> Tensor:
    """Corrective form of :func:`dequantize`: the same code, which Dynamo sees as one operator.

    A call that is not being traced does not pay for the operator's dispatch. Arguments, return value and errors are those
    of :func:`dequantize`.
    """
    check(packed, quant_state)
    if torch.compiler.is_compiling():
        out = torch.ops.dtypedoctor.nf4_dequantize(packed, *_parts(quant_state))
    else:
        out = run_on_current_stream(packed, *_parts(quant_state))
    return out.t() if packed.shape[0] == 1 else out


def check(packed: Tensor, quant_state: QuantState) -> None:
    """Refuses what the C functions would read or write wrongly; they check nothing themselves.

    Raises:
        ValueError: not NF4, not a matrix, an output dtype without a function, packed bytes of another size or order, or,
            on a CPU, an odd number of columns or blocks of 2048 and more.
    """
    shape = quant_state.shape
    functions = NF4_FUNCTIONS.get(packed.device.type)
    if quant_state.quant_type != "nf4" or len(shape) != 2:
        raise ValueError(f"not an NF4 matrix: {quant_state.quant_type} of shape {tuple(shape)}")
    if functions is None or quant_state.dtype not in functions:
        raise ValueError(f"no function dequantizes NF4 to {quant_state.dtype} on {packed.device.type}")
    if 2 * packed.numel() * packed.element_size() != shape[0] * shape[1]:
        raise ValueError(f"{packed.numel()} packed elements are not a matrix of shape {tuple(shape)}")
    if "packing_format_for_cpu" in vars(quant_state):
        raise ValueError("bitsandbytes reordered these bytes for its own CPU kernel in an eval-mode forward")
    if packed.device.type == "cpu" and (shape[1] % 2 or quant_state.blocksize >= CPU_BLOCKSIZE_LIMIT):
        raise ValueError(f"the CPU function does not take {shape[1]} columns in blocks of {quant_state.blocksize}")


def run_kernels(
    packed: Tensor,
    statistics: list[Tensor],
    blocksizes: list[int],
    shape: list[int],
    dtype: torch.dtype,
    stream: Stream,
) -> Tensor:
    """Calls the C functions, unchecked.

    Args:
        packed: packed bytes, in any shape.
        statistics: the block maxima (float32); where they are packed too: their bytes, the code book of 256 values, the
            maxima of their blocks, and the offset (a scalar), all float32 but the bytes.
        blocksizes: weights per block; where the statistics are packed, also maxima per block.
        shape: rows and columns.
        dtype: output dtype.
        stream: gives the stream to launch on; asked on CUDA only.

    Returns:
        (rows, columns) in ``dtype``.
    """
    absmax = statistics[0]
    if len(statistics) > 1:
        absmax = _unpacked_statistics(statistics, blocksizes[1], stream)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    function = NF4_FUNCTIONS[packed.device.type][dtype]
    if packed.device.type == "cpu":
        function(
            get_ptr(packed),
            get_ptr(absmax),
            get_ptr(out),
            ctypes.c_longlong(blocksizes[0]),
            ctypes.c_longlong(shape[0]),
            ctypes.c_longlong(shape[1]),
        )
    else:
        function(
            None,
            get_ptr(packed),
            get_ptr(absmax),
            get_ptr(out),
            ctypes.c_int(blocksizes[0]),
            ctypes.c_int(out.numel()),
            stream(packed.device),
        )
    return out


def _unpacked_statistics(statistics: list[Tensor], blocksize: int, stream: Stream) -> Tensor:
    """Block maxima from their 8-bit form (double quantization of QLoRA, https://arxiv.org/abs/2305.14314)."""
    packed, code, absmax, offset = statistics
    out = torch.empty(packed.shape, dtype=torch.float32, device=packed.device)
    function = STATISTICS_FUNCTIONS[packed.device.type]
    pointers = get_ptr(code), get_ptr(packed), get_ptr(absmax), get_ptr(out)
    if packed.device.type == "cpu":
        function(*pointers, ctypes.c_longlong(blocksize), ctypes.c_longlong(out.numel()))
    else:
        function(*pointers, ctypes.c_int(blocksize), ctypes.c_int(out.numel()), stream(packed.device))
    out += offset
    return out


def run_on_current_stream(
    packed: Tensor, statistics: list[Tensor], blocksizes: list[int], shape: list[int], dtype: torch.dtype
) -> Tensor:
    """:func:`run_kernels` on the current stream of the device that holds ``packed``."""
    for notify in launches:
        notify()
    with torch.cuda.device_of(packed):
        return run_kernels(packed, statistics, blocksizes, shape, dtype, current_stream)


def register_operator() -> None:
    """Registers the operator with torch; harmless where it is registered already."""
    if hasattr(torch.ops.dtypedoctor, "nf4_dequantize"):
        return
    operator = torch.library.custom_op(OPERATOR, run_on_current_stream, mutates_args=())
    operator.register_fake(_describe_output)


def _describe_output(
    packed: Tensor, statistics: list[Tensor], blocksizes: list[int], shape: list[int], dtype: torch.dtype
) -> Tensor:
    """What tracing sees instead of the call: shape, dtype and device of the result."""
    return packed.new_empty(shape, dtype=dtype)


def _parts(state: QuantState) -> tuple[list[Tensor], list[int], list[int], torch.dtype]:
    """A quantization state as the arguments of :func:`run_kernels`: statistics, block sizes, shape, dtype."""
    shape = list(state.shape)
    if not state.nested:
        return [state.absmax], [state.blocksize], shape, state.dtype
    inner = state.state2
    return (
        [state.absmax, inner.code, inner.absmax, state.offset],
        [state.blocksize, inner.blocksize],
        shape,
        state.dtype,
    )


register_operator()
