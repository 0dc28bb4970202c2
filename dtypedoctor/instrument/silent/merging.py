"""What LoRA adds to the weights of a model, as peft's layers hold it."""

from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["added_by_adapters"]


def added_by_adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The name of each layer of LoRA whose adapters are in use, and what they add to its weight; nothing of DoRA, of adapters with a bias and of merged layers.

    Computed here because peft's own ``get_delta_weight`` writes the factors anew on a CPU.
    """
    for name, layer in model.named_modules():
        scaling = getattr(layer, "scaling", None)
        if (
            not isinstance(scaling, dict)
            or getattr(layer, "merged", False)
            or getattr(layer, "disable_adapters", False)
        ):
            continue
        added = [
            _product(layer, adapter) * scaling[adapter]
            for adapter in layer.active_adapters
            if _is_plain_lora(layer, adapter)
        ]
        if added:
            total = sum(added[1:], added[0])
            yield name, total.T if getattr(layer, "fan_in_fan_out", False) else total


def _product(layer: nn.Module, adapter: str) -> Tensor:
    first, second = (getattr(layer, factor)[adapter].weight.detach().float() for factor in ("lora_A", "lora_B"))
    return second @ first


def _is_plain_lora(layer: nn.Module, adapter: str) -> bool:
    first, second = (getattr(layer, factor, None) for factor in ("lora_A", "lora_B"))
    if (
        first is None
        or second is None
        or adapter not in first
        or adapter in getattr(layer, "lora_magnitude_vector", ())
    ):
        return False
    return isinstance(first[adapter], nn.Linear) and getattr(second[adapter], "bias", None) is None
