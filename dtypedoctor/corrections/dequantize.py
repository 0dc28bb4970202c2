"""Corrections of the shared dequantise buffer and of the choice of kernel."""

from dtypedoctor.corrections.contract import Correction
from dtypedoctor.corrections.kernel_swap import swapping
from dtypedoctor.kernels import dequantize

DEQUANTIZE = (
    Correction(
        id="dequant-buffer-keyed-by-dtype",
        summary="Keeps one dequantise buffer per device and dtype instead of one per device.",
        install=swapping(dequantize, shared_buffer=dequantize.buffer_by_device_and_dtype),
    ),
    Correction(
        id="dequant-no-shared-buffer",
        summary="Dequantises each weight into memory of its own.",
        install=swapping(dequantize, shared_buffer=dequantize.buffer_of_its_own),
    ),
    Correction(
        id="dequant-float32-kernel",
        summary="Dequantises a float32 quantisation state with the float32 kernel instead of the bfloat16 one.",
        install=swapping(dequantize, choose_kernel=dequantize.kernel_of_state_dtype),
    ),
)
