"""Corrections of the fused LoRA projections and of dequantizing: steps of the kernels swapped for their corrective forms.

Which of them cures which failure is for the trials to show.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from dtypedoctor.corrections.contract import (
    Counters,
    Installed,
    TargetMismatchError,
    replace_attribute,
    require_signature,
)
from dtypedoctor.tickets.fused_llama import dequantize, fused_lora
from dtypedoctor.tickets.fused_llama.model import is_fused


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
