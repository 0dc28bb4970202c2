"""Casts a model to one dtype with exceptions, loads weights into it, and makes the dtypes uniform afterwards.

The exceptions are a list of strings, and a module is excepted if its dotted name *contains* one of them: `norm` also names
`model.layers.0.post_attention_layernorm`. That is the rule of the `_keep_in_fp32_modules` lists of custom models
(public description: https://github.com/NVIDIA-NeMo/Automodel/pull/1493).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dtypedoctor.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What :func:`reconcile_dtypes` changed.

    Attributes:
        changed: dotted tensor name to the dtype it had.
        kept: dotted module name to the entry of the keep list because of which the module was left alone.
        rounding: dotted tensor name to the largest relative change of an element; the cost of the cast.
    """

    changed: Mapping[str, str]
    kept: Mapping[str, str]
    rounding: Mapping[str, float] = field(default_factory=dict)


def keeper(module_name: str, keep_in_fp32: Sequence[str]) -> str | None:
    """The first entry of the list that is contained in the dotted name, or None."""
    return next((entry for entry in keep_in_fp32 if entry in module_name), None)


def cast_to_dtype(model: nn.Module, dtype: torch.dtype, keep_in_fp32: Sequence[str] = ()) -> dict[str, str]:
    """Casts every floating parameter and buffer of ``model`` to ``dtype``, those of kept modules to float32.

    Packed integer storage is left alone.

    Returns:
        Dotted name of each module that holds tensors and was kept, with the entry that kept it.
    """
    kept: dict[str, str] = {}
    for name, tensors in _holders(model):
        entry = keeper(name, keep_in_fp32)
        if entry is not None:
            kept[name] = entry
        for tensor in tensors.values():
            tensor.data = tensor.data.to(dtype if entry is None else torch.float32)
    return kept


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies ``weights`` into the tensors that ``model`` has; each keeps its dtype, so the dtypes follow the model.

    Raises:
        UsageError: a tensor is missing, left over or of another shape.
    """
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    wrong = sorted(held.keys() ^ weights.keys())
    wrong += [name for name in held.keys() & weights.keys() if held[name].shape != weights[name].shape]
    if wrong:
        raise UsageError(
            f"the weights do not fit the model: {', '.join(wrong[:5])}",
            "Missing, left over or of another shape; build the model with the settings of the checkpoint.",
        )
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(weights[name])


def reconcile_dtypes(model: nn.Module, dtype: torch.dtype, keep_in_fp32: Sequence[str] = ()) -> Reconciled:
    """Casts what is not in ``dtype``, except kept modules; an empty list is the form that ignores the model's own.

    Meant for after a checkpoint was loaded, when dtypes may differ from tensor to tensor.
    """
    changed: dict[str, str] = {}
    kept: dict[str, str] = {}
    rounding: dict[str, float] = {}
    for name, tensors in _holders(model):
        entry = keeper(name, keep_in_fp32)
        if entry is not None:
            kept[name] = entry
            continue
        for leaf, tensor in tensors.items():
            if tensor.dtype != dtype:
                full = f"{name}.{leaf}" if name else leaf
                changed[full] = str(tensor.dtype).removeprefix("torch.")
                rounding[full] = _largest_relative_change(tensor.data, dtype)
                tensor.data = tensor.data.to(dtype)
    return Reconciled(changed=changed, kept=kept, rounding=rounding)


def _holders(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Modules that directly hold floating tensors: dotted name, its tensors by their own names."""
    for name, module in model.named_modules():
        tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        floating = {leaf: tensor for leaf, tensor in tensors.items() if tensor.is_floating_point()}
        if floating:
            yield name, floating


def _largest_relative_change(tensor: Tensor, dtype: torch.dtype) -> float:
    wide = tensor.double()
    change = (tensor.to(dtype).double() - wide).abs() / wide.abs().clamp_min(torch.finfo(torch.float64).tiny)
    return float(change.max()) if change.numel() else 0.0
