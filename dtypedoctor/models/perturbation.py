"""Moves weights and gradients by one unit in the last place, to measure how much a model's outputs depend on such rounding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.scenario.model import Perturbation


def perturb(model: nn.Module, spec: Perturbation) -> None:
    """Moves every unpacked floating parameter of ``model``, up or down at random, by one unit in the last place of ``spec.dtype``,
    and so each gradient that comes back to a parameter or to the output of a module without modules in it.

    The unit of a value x with 2^e <= |x| < 2^(e+1) is 2^e * eps, whatever dtype it is stored in (which should be float32, or
    the move is rounded); zeros stay zeros. A gradient's unit is no smaller than the smallest number of the dtype: a weight below
    that was rounded when the model was cast, a gradient is rounded in each backward pass anew. In float16 that is most of what a
    training step rounds.
    """
    generator = torch.Generator().manual_seed(spec.seed)
    limits = torch.finfo(getattr(torch, spec.dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
                parameter.add_(_unit(parameter, limits.eps) * _signs(parameter, generator))

    def moved(gradient: Tensor) -> Tensor:
        unit = _unit(gradient, limits.eps, at_least=limits.smallest_normal * limits.eps)
        return gradient + unit * _signs(gradient, generator)

    _on_gradients(model, moved)


def _on_gradients(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def watch_output(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(change)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(change)
    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(watch_output)


def _unit(tensor: Tensor, eps: float, at_least: float = 0.0) -> Tensor:
    _, exponent = torch.frexp(tensor.float())  # |x| = m * 2^exponent with 0.5 <= m < 1
    unit = torch.ldexp(torch.full_like(tensor, eps, dtype=torch.float32), exponent - 1).clamp_min(at_least)
    return torch.where(tensor == 0, torch.zeros_like(unit), unit).to(tensor.dtype)


def _signs(tensor: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, tensor.shape, generator=generator)
    return (2 * bits - 1).to(device=tensor.device, dtype=tensor.dtype)
