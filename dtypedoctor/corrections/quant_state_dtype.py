"""Sets the dtype that packed weights come back in."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtypedoctor.corrections.contract import Installed, TargetMismatchError
from dtypedoctor.corrections.counters import Counters
from dtypedoctor.corrections.module_forward import runs_other_forward

HALF = (torch.float16, torch.bfloat16)
"""What the dequantise kernels of fused training libraries know."""


def install_quant_state_dtype(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Sets ``quant_state.dtype`` of every packed weight to the dtype of the activations, that of the input embedding.

    ``hits`` is the number of quantisation states that were changed.
    """
    dtype = _activation_dtype(model)
    states = _quant_states(model)
    before = {name: state.dtype for name, state in states.items() if state.dtype != dtype}
    if not before:
        raise TargetMismatchError(f"there is nothing to set: each of {len(states)} quant_states already says {dtype}")
    if dtype not in HALF and any(runs_other_forward(module) for module in model.modules()):
        raise TargetMismatchError(
            f"there is no dequantise kernel for {dtype} in fused code: the weights would be silently wrong"
        )
    counters = Counters(hits=len(before))
    for name in before:
        states[name].dtype = dtype

    def undo() -> None:
        for name, old in before.items():
            states[name].dtype = old

    found = {str(state.dtype) for state in _quant_states(model).values()}
    return Installed(
        target="quant_state.dtype",
        proof=f"{len(before)} of {len(states)} quant_states were changed; all now say {', '.join(sorted(found))}",
        undo=undo,
        counters=counters,
    )


def _activation_dtype(model: nn.Module) -> torch.dtype:
    find = getattr(model, "get_input_embeddings", None)
    weight = getattr(find() if find else None, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise TargetMismatchError(f"{type(model).__name__} has no input embedding to take the activations' dtype from")
    return weight.dtype


def _quant_states(model: nn.Module) -> dict[str, Any]:
    states = {name: getattr(parameter, "quant_state", None) for name, parameter in model.named_parameters()}
    found = {name: state for name, state in states.items() if state is not None}
    if not found:
        raise TargetMismatchError(f"{type(model).__name__} has no packed weights")
    return found
