"""Corrections of the shared dequantise buffer and of the choice of kernel."""

from dtypedoctor.corrections.kernel_swap import swapping
from dtypedoctor.kernels import dequantize

install_dequant_buffer_keyed_by_dtype = swapping(dequantize, shared_buffer=dequantize.buffer_by_device_and_dtype)

install_dequant_no_shared_buffer = swapping(dequantize, shared_buffer=dequantize.buffer_of_its_own)

install_dequant_float32_kernel = swapping(dequantize, choose_kernel=dequantize.kernel_of_state_dtype)
