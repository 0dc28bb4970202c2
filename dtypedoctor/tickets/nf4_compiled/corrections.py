"""Corrections of the NF4 fast path in :mod:`dtypedoctor.tickets.nf4_compiled.nf4_ctypes`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from dtypedoctor._torch_private import schema_of
from dtypedoctor.corrections.contract import (
    Counters,
    Installed,
    TargetMismatchError,
    replace_attribute,
    require_signature,
)
from dtypedoctor.tickets.nf4_compiled import nf4_ctypes


def install_custom_op(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Replaces the fast path by its form that Dynamo sees as one operator; it also asks for the stream at each call.

    The counter ``hits`` counts runs of the operator and of its eager form.

    Raises:
        TargetMismatchError: the model has no NF4 weight, or the fast path is not the one this was written for.
    """
    _require_nf4(model)
    require_signature(nf4_ctypes.dequantize, ("packed", "quant_state"), "nf4_ctypes.dequantize")
    if nf4_ctypes.dequantize is nf4_ctypes.dequantize_compile_safe:
        raise TargetMismatchError("nf4_ctypes.dequantize has been replaced already")
    nf4_ctypes.register_operator()
    counters = Counters()
    notify = counters.hit
    installed = replace_attribute(nf4_ctypes, "dequantize", nf4_ctypes.dequantize_compile_safe, counters)
    nf4_ctypes.launches.append(notify)

    def undo() -> None:
        installed.undo()
        if notify in nf4_ctypes.launches:
            nf4_ctypes.launches.remove(notify)

    schema = schema_of(torch.ops.dtypedoctor.nf4_dequantize.default)
    return replace(installed, undo=undo, proof=f"{installed.proof}; registered as {schema.name}")


def install_stream_per_call(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Replaces the stream that the process found first by the stream that is current at each call.

    Only launches on CUDA ask for a stream, so ``hits`` stays 0 on a CPU.

    Raises:
        TargetMismatchError: the model has no NF4 weight, or the function is not the one this was written for.
    """
    _require_nf4(model)
    require_signature(nf4_ctypes.launch_stream, ("device",), "nf4_ctypes.launch_stream")
    counters = Counters()

    def launch_stream(device: torch.device) -> object:
        counters.hit()
        return nf4_ctypes.current_stream(device)

    return replace_attribute(nf4_ctypes, "launch_stream", launch_stream, counters)


def _require_nf4(model: nn.Module) -> None:
    kinds = {getattr(getattr(p, "quant_state", None), "quant_type", None) for p in model.parameters()}
    if "nf4" not in kinds:
        raise TargetMismatchError(f"{type(model).__name__} has no NF4 weight")
