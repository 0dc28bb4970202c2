"""Corrections of transformers' Gemma-4 text model."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dtypedoctor.corrections.contract import (
    Correction,
    Installed,
    TargetMismatchError,
    replace_attribute,
    require_signature,
)
from dtypedoctor.kernels.counters import Counters
from dtypedoctor.kernels.gemma4_mlp import gated_mlp_float32_product

MLP_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def install_mlp_float32_product(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Replaces ``Gemma4TextMLP.forward`` for every instance of the class that ``model`` uses.

    Raises:
        TargetMismatchError: the model has no such MLP, or the class is not the one this was written for.
    """
    found = next((m for m in model.modules() if "Gemma4TextMLP" in (c.__name__ for c in type(m).__mro__)), None)
    if found is None:
        raise TargetMismatchError(f"{type(model).__name__} has no Gemma4TextMLP")
    owner = next(c for c in type(found).__mro__ if "forward" in c.__dict__)
    label = f"{owner.__module__}.{owner.__qualname__}"
    require_signature(inspect.unwrap(owner.__dict__["forward"]), ("self", "x"), f"{label}.forward")
    missing = [part for part in MLP_PARTS if not hasattr(found, part)]
    if missing:
        raise TargetMismatchError(f"{label} has no {', '.join(missing)}")
    counters = Counters()

    def forward(self: Any, x: Tensor) -> Tensor:
        return gated_mlp_float32_product(x, self.gate_proj, self.up_proj, self.down_proj, self.act_fn, counters)

    return replace_attribute(owner, "forward", forward, counters)


MLP_FLOAT32_PRODUCT = Correction(
    id="gemma4-mlp-float32-product",
    summary="Computes act(gate) * up of Gemma-4's MLP in float32 and holds it within ±65280 before down_proj.",
    install=install_mlp_float32_product,
)
