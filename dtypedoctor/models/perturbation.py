"""Moves weights by one unit in the last place, to measure how much a model's outputs depend on such rounding."""

import torch
from torch import Tensor, nn

from dtypedoctor.scenario.model import Perturbation


def perturb(model: nn.Module, spec: Perturbation) -> None:
    """Moves every unpacked floating parameter of ``model``, up or down at random, by one unit in the last place of ``spec.dtype``.

    The unit of a value x with 2^e <= |x| < 2^(e+1) is 2^e * eps, whatever dtype it is stored in (which should be float32, or
    the move is rounded); zeros stay zeros.
    """
    generator = torch.Generator().manual_seed(spec.seed)
    eps = torch.finfo(getattr(torch, spec.dtype)).eps
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
                parameter.add_(_unit(parameter, eps) * _signs(parameter, generator))


def _unit(tensor: Tensor, eps: float) -> Tensor:
    _, exponent = torch.frexp(tensor.float())  # |x| = m * 2^exponent with 0.5 <= m < 1
    unit = torch.ldexp(torch.full_like(tensor, eps, dtype=torch.float32), exponent - 1)
    return torch.where(tensor == 0, torch.zeros_like(unit), unit).to(tensor.dtype)


def _signs(tensor: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, tensor.shape, generator=generator)
    return (2 * bits - 1).to(device=tensor.device, dtype=tensor.dtype)
