"""A correction: the gated product of live layers in float32."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from dtypedoctor.corrections.contract import Counters, Installed, TargetMismatchError, wrap_forwards
from tinylab.model import GatedLayer


def install(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Gives every gated layer a forward that leaves float32 only at its end."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, GatedLayer)}
    if not layers:
        raise TargetMismatchError(f"{type(model).__name__} has no GatedLayer")
    counters = Counters()

    def wrap(layer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor) -> Tensor:
            counters.hit()
            product = layer.gate(x).float() * layer.up(x).float()
            return linear(product, layer.down.weight.float()).to(x.dtype)

        return forward

    return wrap_forwards(layers, wrap, counters)
