"""Corrections of the shared dequantise buffer and of the choice of kernel."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dtypedoctor.corrections.contract import Correction, Installed
from dtypedoctor.corrections.kernel_swap import swap_step
from dtypedoctor.kernels import dequantize
from dtypedoctor.kernels.counters import Counters


def _swap(name: str, corrective: Callable[..., Any]) -> Callable[[nn.Module, Sequence[str]], Installed]:
    def install(model: nn.Module, modules: Sequence[str]) -> Installed:
        return swap_step(model, dequantize, name, corrective, Counters())

    return install


CORRECTIONS_DEQUANTIZE = (
    Correction(
        id="dequant-buffer-keyed-by-dtype",
        summary="Keeps one dequantise buffer per device and dtype instead of one per device.",
        install=_swap("shared_buffer", dequantize.buffer_by_device_and_dtype),
    ),
    Correction(
        id="dequant-no-shared-buffer",
        summary="Dequantises each weight into memory of its own.",
        install=_swap("shared_buffer", dequantize.buffer_of_its_own),
    ),
    Correction(
        id="dequant-float32-kernel",
        summary="Dequantises a float32 quantisation state with the float32 kernel instead of the bfloat16 one.",
        install=_swap("choose_kernel", dequantize.kernel_of_state_dtype),
    ),
)
