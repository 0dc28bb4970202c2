"""Corrections that cast at one place: the output of norms, what packed weights are dequantized to, trainable adapters."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.corrections.contract import (
    Counters,
    Forward,
    Installed,
    TargetMismatchError,
    named_modules_of,
    require_memory,
    runs_other_forward,
    wrap_forwards,
)
from dtypedoctor.lab.corrections.float32_frames import mapped

HALF = (torch.float16, torch.bfloat16)


def install_norm_output_cast(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Casts the output of norms back to the dtype of their input.

    Which modules are meant is measured, not read from a class name's list: those (of ``modules``, or of all whose class
    name has "norm" in it) that return something wider for a row of ones in the model's own 16-bit dtype.

    Raises:
        TargetMismatchError: no norm widens its input, or a named module does not, or the model is not 16-bit.
    """
    dtype = half_dtype_of(model)
    if modules:
        targets = named_modules_of(model, list(modules))
        tame = [name for name, module in targets.items() if not widens(module, dtype)]
        if tame:
            raise TargetMismatchError(f"{', '.join(tame)} does not widen {dtype} input")
    else:
        targets = {
            name: module
            for name, module in model.named_modules()
            if ("norm" in type(module).__name__.lower()) and widens(module, dtype)
        }
        if not targets:
            raise TargetMismatchError(f"no norm of {type(model).__name__} widens {dtype} input")
    counters = Counters()
    installed = wrap_forwards(targets, _casting_output(counters), counters)
    stubborn = [name for name, module in targets.items() if widens(module, dtype)]
    counters.hits = 0  # the row of ones is not part of the run
    if stubborn:
        installed.undo()
        raise TargetMismatchError(f"{', '.join(stubborn)} still widens {dtype} input after the correction")
    return replace(installed, proof=f"{installed.proof}; a row of ones in {dtype} now comes out in {dtype}")


def half_dtype_of(model: nn.Module) -> torch.dtype:
    """The 16-bit dtype that most parameter elements of ``model`` have.

    Raises:
        TargetMismatchError: the model has no 16-bit parameters.
    """
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in HALF:
            elements[parameter.dtype] += parameter.numel()
    if not elements:
        raise TargetMismatchError(f"{type(model).__name__} has no float16 or bfloat16 parameters")
    return elements.most_common(1)[0][0]


def widens(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether ``module`` returns something wider than ``dtype`` for a row of ones; hooks on it are not called.

    A module that does not take such a row, because its weight is no vector or its forward is another, does not widen it.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return False
    try:
        with torch.no_grad():
            out = module.forward(torch.ones(1, len(weight), dtype=dtype, device=weight.device))
    except (TypeError, RuntimeError):
        return False
    return isinstance(out, Tensor) and out.dtype.itemsize > dtype.itemsize


def _casting_output(counters: Counters) -> Callable[[nn.Module, Forward], Forward]:
    def wrap(module: nn.Module, original: Forward) -> Forward:
        def forward(x: Tensor) -> Tensor:
            out: Tensor = original(x)
            if out.dtype != x.dtype:
                counters.hit()
            return out.to(x.dtype)

        return forward

    return wrap


def install_quant_state_dtype(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Sets ``quant_state.dtype`` of every packed weight to the dtype of the activations, that of the input embedding.

    ``hits`` is the number of quantization states that were changed.
    """
    find = getattr(model, "get_input_embeddings", None)
    weight = getattr(find() if find else None, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise TargetMismatchError(f"{type(model).__name__} has no input embedding to take the activations' dtype from")
    dtype = weight.dtype
    states = _quant_states(model)
    before = {name: state.dtype for name, state in states.items() if state.dtype != dtype}
    if not before:
        raise TargetMismatchError(f"there is nothing to set: each of {len(states)} quant_states already says {dtype}")
    if dtype not in HALF and any(runs_other_forward(module) for module in model.modules()):
        raise TargetMismatchError(
            f"there is no dequantize kernel for {dtype} in fused code: the weights would be silently wrong"
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


def _quant_states(model: nn.Module) -> dict[str, Any]:
    states = {name: getattr(parameter, "quant_state", None) for name, parameter in model.named_parameters()}
    found = {name: state for name, state in states.items() if state is not None}
    if not found:
        raise TargetMismatchError(f"{type(model).__name__} has no packed weights")
    return found


def install_float32_adapters(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Widens peft's trainable adapters to float32, and its trainable copies of float32 modules with them.

    peft creates adapters in float32 (``autocast_adapter_dtype``); this undoes the cast of a trainer. It casts an adapter's input itself.
    Nothing casts the input of a copy (``modules_to_save``), so that gets the dtype of the module that it copies. ``hits`` is the number
    of parameters that were widened. An optimizer that has not stepped yet continues with them.

    Raises:
        TargetMismatchError: there is no such parameter, one has a gradient already, or gradients are reduced over several ranks.
    """
    narrow = {name: parameter for name, parameter in _peft_parameters(model) if parameter.dtype in HALF}
    if not narrow:
        raise TargetMismatchError(f"{type(model).__name__} has no trainable adapter of peft in float16 or bfloat16")
    if any(parameter.grad is not None for parameter in narrow.values()):
        raise TargetMismatchError("an adapter has a gradient already, which would keep its dtype")
    _require_one_rank()
    before = {name: parameter.dtype for name, parameter in narrow.items()}
    for parameter in narrow.values():
        parameter.data = parameter.data.float()

    def undo() -> None:
        for name, dtype in before.items():
            narrow[name].data = narrow[name].data.to(dtype)

    was = ", ".join(sorted({str(dtype) for dtype in before.values()}))
    return Installed(
        target="trainable adapters of peft",
        proof=f"{len(before)} trainable parameters were {was} and are torch.float32: {', '.join(list(before)[:3])}, …",
        undo=undo,
        counters=Counters(hits=len(before)),
    )


def _require_one_rank() -> None:
    """A parameter whose dtype changes gets another node in the graph than the one through which its gradient is reduced.

    Raises:
        TargetMismatchError: this process is one of several ranks.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise TargetMismatchError(
            "gradients of several ranks are reduced in buckets of the dtypes that the weights had; "
            "make the change in the script, before the model is wrapped"
        )


def _peft_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable parameters of adapters, and of copies whose original is float32, by their names."""
    for name, module in model.named_modules():
        for part, holder in _trained_parts(module).items():
            for inner, parameter in holder.named_parameters():
                if parameter.requires_grad:
                    yield f"{name}.{part}.{inner}", parameter


def _trained_parts(module: nn.Module) -> dict[str, nn.Module]:
    """What peft trains in one of its own layers: the adapter's matrices, or the copy of a float32 module."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        return {part: getattr(module, part) for part in module.adapter_layer_names}
    if isinstance(module, ModulesToSaveWrapper):
        original = next(module.original_module.parameters(), None)
        if original is not None and original.dtype == torch.float32:
            return {"modules_to_save": module.modules_to_save}
    return {}


def install_bfloat16_weights(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Casts a live model's float16 parameters and buffers to bfloat16, and float16 inputs of it and of modules that hold parameters.

    ``hits`` is the number of tensors that were cast. ``undo`` has the float16 ones back, which are kept in memory as long as it is.

    Raises:
        TargetMismatchError: nothing is float16, a weight is packed, a parameter has a gradient already, gradients are reduced over
            several ranks, or the call is in a float16 autocast region.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    narrow = {name: tensor for name, tensor in named.items() if tensor.dtype == torch.float16}
    if not narrow:
        raise TargetMismatchError(f"{type(model).__name__} has no float16 parameters")
    require_memory(narrow)
    if any(getattr(tensor, "quant_state", None) is not None for tensor in named.values()):
        raise TargetMismatchError(f"{type(model).__name__} has packed weights, which were quantized from float16")
    if any(tensor.grad is not None for tensor in narrow.values()):
        raise TargetMismatchError("a parameter has a gradient already, which would stay float16")
    _require_one_rank()
    devices = {tensor.device.type for tensor in narrow.values()}
    if any(torch.is_autocast_enabled(one) and torch.get_autocast_dtype(one) == torch.float16 for one in devices):
        raise TargetMismatchError("the model is called in a float16 autocast region")
    before = {name: tensor.data for name, tensor in narrow.items()}
    for tensor in narrow.values():
        tensor.data = tensor.data.to(torch.bfloat16)
    # of the call during which this is installed, the model's own hooks have been collected already: those inside get its inputs
    holders = [one for one in model.modules() if one is model or next(one.parameters(recurse=False), None) is not None]
    hooks = [one.register_forward_pre_hook(_float16_inputs_cast, with_kwargs=True) for one in holders]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for name, data in before.items():
            narrow[name].data = data

    return Installed(
        target=type(model).__name__,
        proof=f"{len(before)} of {len(named)} parameters and buffers were torch.float16 and are torch.bfloat16",
        undo=undo,
        counters=Counters(hits=len(before)),
    )


def _float16_inputs_cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return mapped((args, kwargs), lambda tensor: tensor.to(torch.bfloat16) if tensor.dtype == torch.float16 else tensor)
