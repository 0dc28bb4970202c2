"""A guard at the low-rank layers of the custom decoder."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from dtypedoctor.corrections.contract import (
    Counters,
    Forward,
    Installed,
    TargetMismatchError,
    named_modules_of,
    wrap_forwards,
)
from dtypedoctor.tickets.custom_moe.layers import LinearLoRA


def install_cast_at_lora_input(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Casts the input of low-rank adapted linear layers to the dtype of their update; a guard, not a cure of the cause.

    Args:
        model: a model with :class:`LinearLoRA` layers.
        modules: dotted names of the layers that are meant; all if empty.

    Raises:
        TargetMismatchError: the model has no such layer, or a named module is not one.
    """
    if modules:
        targets = named_modules_of(model, list(modules))
        others = [name for name, module in targets.items() if not isinstance(module, LinearLoRA)]
        if others:
            raise TargetMismatchError(f"{', '.join(others)} is not a LinearLoRA")
    else:
        targets = {name: module for name, module in model.named_modules() if isinstance(module, LinearLoRA)}
        if not targets:
            raise TargetMismatchError(f"{type(model).__name__} has no LinearLoRA")
    counters = Counters()
    return wrap_forwards(targets, _casting_input(counters), counters)


def _casting_input(counters: Counters) -> Callable[[nn.Module, Forward], Forward]:
    def wrap(module: nn.Module, original: Forward) -> Forward:
        assert isinstance(module, LinearLoRA)  # the targets were chosen so
        wanted = module.lora_a.weight

        def forward(x: Tensor) -> Tensor:
            if x.dtype != wanted.dtype:
                counters.hit()
            cast: Tensor = original(x.to(wanted.dtype))
            return cast

        return forward

    return wrap
