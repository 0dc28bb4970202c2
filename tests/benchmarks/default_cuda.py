"""Makes CUDA the default device of a program, which then gets the random numbers that it would get on a CPU.

Importing it is all: modules and tensors are made on the GPU, and what draws random numbers draws them on the CPU and copies them.
"""

from functools import wraps
from typing import Any

import torch

FACTORIES = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like")
IN_PLACE = ("uniform_", "normal_", "bernoulli_", "random_", "exponential_")


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _drawn_on_cpu(original: Any) -> Any:
    @wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", "cuda")
        args = tuple(map(_on_cpu, args))
        kwargs = {key: _on_cpu(value) for key, value in kwargs.items()}
        with torch.device("cpu"):
            return original(*args, **kwargs).to(device)

    return drawn


def _filled_on_cpu(original: Any) -> Any:
    @wraps(original)
    def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not tensor.is_cuda:
            return original(tensor, *args, **kwargs)
        with torch.no_grad(), torch.device("cpu"):
            return tensor.copy_(original(torch.empty_like(tensor, device="cpu"), *map(_on_cpu, args), **kwargs))

    return filled


for _name in FACTORIES:
    setattr(torch, _name, _drawn_on_cpu(getattr(torch, _name)))
for _name in IN_PLACE:
    setattr(torch.Tensor, _name, _filled_on_cpu(getattr(torch.Tensor, _name)))
torch.set_default_device("cuda")
