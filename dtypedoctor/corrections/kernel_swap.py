"""Swaps a step of the fused kernels for its corrective form, counted and proven."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from dtypedoctor.corrections.contract import Installed, TargetMismatchError, replace_attribute, require_signature
from dtypedoctor.kernels.counters import Counters
from dtypedoctor.kernels.llama_forward import is_fused


def swap_step(
    model: nn.Module, module: ModuleType, name: str, corrective: Callable[..., Any], counters: Counters
) -> Installed:
    """Puts ``corrective`` in the place of the function ``module.name``; each call of it counts as a hit.

    Raises:
        TargetMismatchError: no module of ``model`` runs through the fused kernels, the step does not take the same
            parameters as ``corrective``, or another correction is already in its place.
    """
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


def together(*parts: Installed) -> Installed:
    """Several swaps that make up one correction and share their counters."""

    def undo() -> None:
        for part in parts:
            part.undo()

    return Installed(
        target=", ".join(part.target for part in parts),
        proof="; ".join(part.proof for part in parts),
        undo=undo,
        counters=parts[0].counters,
    )
