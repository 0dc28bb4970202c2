"""What LoRA adds to the weights of a model, as peft's layers hold it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dtypedoctor.instrument.module_tree import attribute_of, named_modules

__all__ = ["Added", "added_by_adapters"]


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """What adapters in use add to the weight of a layer; in float32.

    Computed here because peft's own ``get_delta_weight`` writes the factors anew on a CPU.

    Attributes:
        factors: of each adapter, the second one first, and its scale.
        transposed: whether the weight is stored with its inputs first.
    """

    factors: list[tuple[Tensor, Tensor, float]]
    transposed: bool

    def whole(self) -> Tensor:
        """All of it, of the size of the weight."""
        total = sum(second.float() @ first.float() * scale for second, first, scale in self.factors)
        assert isinstance(total, Tensor)
        return total.T if self.transposed else total

    def at(self, places: Tensor) -> Tensor:
        """Some elements, by their number in the weight."""
        second, first, _ = self.factors[0]
        width = len(second) if self.transposed else first.shape[1]
        rows, columns = places // width, places % width
        if self.transposed:
            rows, columns = columns, rows
        parts = [
            (second[rows].float() * first.T[columns].float()).sum(-1) * scale for second, first, scale in self.factors
        ]
        return sum(parts[1:], parts[0])


def added_by_adapters(model: nn.Module) -> Iterator[tuple[str, Added]]:
    """The name of each layer of LoRA whose adapters are in use, and what they add to its weight; nothing of DoRA, of adapters with a bias and of merged layers."""
    for name, layer in named_modules(model):
        if not isinstance(attribute_of(layer, "scaling"), dict):
            continue
        if getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
            continue
        active: Any = layer.active_adapters
        factors = [_factors(layer, adapter) for adapter in active if _is_plain_lora(layer, adapter)]
        if factors:
            yield name, Added(factors, bool(getattr(layer, "fan_in_fan_out", False)))


def _factors(layer: nn.Module, adapter: str) -> tuple[Tensor, Tensor, float]:
    second, first = (getattr(layer, factor)[adapter].weight.detach() for factor in ("lora_B", "lora_A"))
    return second, first, getattr(layer, "scaling")[adapter]  # noqa: B009  (a dict, where nn.Module promises a tensor)


def _is_plain_lora(layer: nn.Module, adapter: str) -> bool:
    first, second = (getattr(layer, factor, None) for factor in ("lora_A", "lora_B"))
    if first is None or second is None or adapter not in first:
        return False
    is_dora = adapter in getattr(layer, "lora_magnitude_vector", ())
    return not is_dora and isinstance(first[adapter], nn.Linear) and getattr(second[adapter], "bias", None) is None
