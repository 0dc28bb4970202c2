"""The weights that a model computes with, by name: packed ones dequantized, what adapters add to them, and who shares memory with whom."""

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import COMPILED_MODULE, is_persistent


class NotComparableError(Exception):
    """Why something cannot be compared, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What adapters add to a weight.

    Attributes:
        delta: float64, in the weight's shape.
        magnitude: the same product of magnitudes, which bounds the rounding of its sums.
        dtype: with the widest spacing among the adapters.
    """

    delta: Tensor
    magnitude: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter or buffer of a model.

    Attributes:
        tensor: as the model holds it.
        holder: the module that has it.
        is_saved: whether a state dict has it.
        adapter: the adapter layer around its module, where the weight is wanted with what that adds.
    """

    tensor: Tensor
    holder: nn.Module
    is_saved: bool
    adapter: Any = None

    @property
    def packing(self) -> str:
        """How it is quantized; empty where it is dense."""
        state = getattr(self.tensor, "quant_state", None)
        if state is not None:
            return str(state.quant_type)
        if self._row_scales() is not None:
            return "int8"
        # torchao's and DTensor's tensors are wrappers around others
        return type(self.tensor).__name__ if hasattr(self.tensor, "__tensor_flatten__") else ""

    def dense(self) -> Tensor:
        """The weight on the CPU as its layer multiplies with it, without what adapters add.

        Raises:
            NotComparableError: it has no values, or is packed in a format that cannot be read.
        """
        tensor = self.tensor.detach()
        if tensor.is_meta:
            raise NotComparableError("it is on the meta device")
        state = getattr(self.tensor, "quant_state", None)
        if state is not None:
            from bitsandbytes.functional import dequantize_4bit

            values: Tensor = dequantize_4bit(tensor.data, state)
            return values.cpu()
        if (scales := self._row_scales()) is not None:
            return (tensor.float() * (scales.float() / 127).unsqueeze(1)).cpu()
        if self.packing:
            try:
                unpacked: Tensor = tensor.dequantize().cpu()
                return unpacked
            except (NotImplementedError, RuntimeError, TypeError) as error:
                raise NotComparableError(f"{self.packing} cannot be dequantized") from error
        return tensor.cpu()

    def requantized(self, dense: Tensor) -> Tensor:
        """Other values, quantized as this weight is and dequantized.

        Raises:
            NotComparableError: its format cannot be made here.
        """
        if self.packing == "int8":
            step = dense.abs().amax(dim=1, keepdim=True) / 127
            return torch.where(step > 0, (dense / step).round() * step, 0.0)
        state = getattr(self.tensor, "quant_state", None)
        if state is None:
            raise NotComparableError(f"nothing here quantizes to {self.packing}")
        # Computed here: on a CPU bitsandbytes 0.50 dequantizes rows wrongly that are shorter than a block
        code = state.code.double().cpu()
        blocks = dense.double().reshape(-1, state.blocksize)
        scale = blocks.abs().amax(dim=1, keepdim=True)
        nearest = torch.bucketize(blocks / scale.clamp(min=1e-300), (code[1:] + code[:-1]) / 2)
        quantized: Tensor = code[nearest] * scale
        return quantized.reshape(dense.shape)

    def update(self) -> Update | None:
        """What the active adapters add; None where there is none.

        Raises:
            NotComparableError: the adapter is of a kind that cannot be computed here.
        """
        layer = self.adapter
        if layer is None or layer.merged or layer.disable_adapters:
            return None
        is_plain = hasattr(layer, "lora_A") and not layer.lora_variant and self.tensor.dim() == 2
        return _low_rank(layer) if is_plain else _measured(layer, self.dense())

    def _row_scales(self) -> Tensor | None:
        if self.tensor.dtype is not torch.int8:
            return None
        scales = getattr(self.tensor, "SCB", None)
        return scales if scales is not None else getattr(getattr(self.holder, "state", None), "SCB", None)


def _low_rank(layer: Any) -> Update | None:
    """The sum of s·BA over adapters, in float64."""
    delta, magnitude, dtypes = torch.zeros(()), torch.zeros(()), []
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight.detach().cpu(), layer.lora_B[name].weight.detach().cpu()
        elif name in layer.lora_embedding_A:  # a table has a row for each id
            b, a = layer.lora_embedding_A[name].detach().cpu().T, layer.lora_embedding_B[name].detach().cpu().T
        else:
            continue
        dtypes += [a.dtype, b.dtype]
        delta = delta + layer.scaling[name] * (b.double() @ a.double())
        magnitude = magnitude + abs(layer.scaling[name]) * (b.double().abs() @ a.double().abs())
    if getattr(layer, "fan_in_fan_out", False):
        delta, magnitude = delta.T, magnitude.T
    return Update(delta=delta, magnitude=magnitude, dtype=widest_spacing(*dtypes)) if dtypes else None


def _measured(layer: Any, weight: Tensor) -> Update | None:
    """What any other adapter adds to a linear layer: its output for each unit vector, without the bias, beside the weight's."""
    if not layer.active_adapters:
        return None
    size = getattr(layer, "in_features", None)
    if not isinstance(layer.base_layer, nn.Linear) or not size or not weight.is_floating_point():
        raise NotComparableError(
            f"what {type(layer).__name__} adds to {type(layer.base_layer).__name__} is not computed here"
        )
    twin = copy.deepcopy(layer).cpu().float().eval()
    with torch.no_grad():
        effective = (twin(torch.eye(size)) - twin(torch.zeros(1, size))).T.double()
    delta = effective - weight.double()
    return Update(delta=delta, magnitude=effective.abs() + weight.double().abs(), dtype=torch.float32)


def widest_spacing(*dtypes: torch.dtype) -> torch.dtype:
    """The floating-point dtype with the fewest digits."""
    several = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(several, key=lambda dtype: torch.finfo(dtype).eps) if several else torch.float32


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of ``torch.compile`` and ``DistributedDataParallel``, whose names are those of the file."""
    inner = getattr(model, COMPILED_MODULE, None)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = model.module
    return model if inner is None else unwrapped(inner)


def is_adapter(module: nn.Module) -> bool:
    """Whether it is an adapter layer of peft."""
    layers = sys.modules.get("peft.tuners.tuners_utils")
    return layers is not None and isinstance(module, layers.BaseTunerLayer)


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The outermost adapter layers by their name without what peft adds to it."""
    layers = {weight.adapter: name for name, weight in weights_of(model, merged=True).items() if weight.adapter}
    return {name.rpartition(".")[0]: layer for layer, name in layers.items()}


def weights_of(model: nn.Module, *, merged: bool = False) -> dict[str, Weight]:
    """Every parameter and buffer by name, those with several names under each.

    Args:
        model: the model.
        merged: leave the adapters' own parameters out, and what peft adds to names; their layers' weights know their adapters.
    """
    inner: Any = model
    # An adapter that is not active is no part of what the model computes, and is saved by itself
    others = {*inner.peft_config} - {*inner.active_adapters} if hasattr(model, "get_base_model") else set()
    if merged and hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    return {name: weight for name, weight in _weights(inner, "", merged) if others.isdisjoint(name.split("."))}


def _weights(module: nn.Module, prefix: str, merged: bool) -> Iterator[tuple[str, Weight]]:
    module, adapter = _inside(module) if merged else (module, None)
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        around = adapter if name == "weight" else None
        yield prefix + name, Weight(tensor=parameter, holder=module, is_saved=True, adapter=around)
    for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
        yield prefix + name, Weight(tensor=tensor, holder=module, is_saved=is_persistent(module, name))
    for name, child in module.named_children():
        yield from _weights(child, f"{prefix}{name}.", merged)


def _inside(module: Any) -> tuple[nn.Module, Any]:
    """The module in the place of which peft has put this one, and the adapter layer around it; a trained copy of it where there is one."""
    if is_adapter(module) and hasattr(module, "base_layer"):
        return _inside(module.base_layer)[0], module
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        active = [name for name in module.active_adapters if name in module.modules_to_save]
        return (module.modules_to_save[active[-1]] if active else module.original_module), None
    return module, None


def ties_of(weights: dict[str, Weight]) -> set[frozenset[str]]:
    """The groups of names that are one tensor."""
    groups: dict[tuple[int, tuple[int, ...]], set[str]] = {}
    for name, weight in weights.items():
        if weight.tensor.numel() and not weight.tensor.is_meta:
            groups.setdefault((weight.tensor.data_ptr(), tuple(weight.tensor.shape)), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}
