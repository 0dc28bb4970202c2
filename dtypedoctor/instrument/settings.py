"""Keeps what a call depends on beside its module and its arguments: settings of torch and random generators, which a program changes between calls."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dtypedoctor._torch_private import EnableTorchFunction

__all__ = ["RandomState", "Settings"]

_FLAGS = (
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.conv.fp32_precision",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
)
"""Of ``torch.backends``."""


def _flag(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    owner, _, last = name.rpartition(".")
    read, owner_of = attrgetter(name), attrgetter(owner)
    return partial(read, torch.backends), lambda value: setattr(owner_of(torch.backends), last, value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    *map(_flag, _FLAGS),
)
"""How each setting is read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the process at one moment.

    Attributes:
        values: of :data:`_SETTINGS`; None for one that could not be read.
        device: where new tensors go.
    """

    values: tuple[Any, ...]
    device: torch.device

    @staticmethod
    def now() -> "Settings":
        """What is set now."""
        try:
            values = [read() for read, _ in _SETTINGS]
        except (AttributeError, RuntimeError):
            values = [_read(read) for read, _ in _SETTINGS]
        return Settings(values=tuple(values), device=_default_device())

    @property
    def default_dtype(self) -> torch.dtype:
        """That of new floating-point tensors."""
        dtype: torch.dtype = self.values[0]
        return dtype

    def with_default_dtype(self, name: str) -> "Settings":
        """These settings, but for the default dtype."""
        return replace(self, values=(getattr(torch, name), *self.values[1:]))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, all is set as it was then; afterwards as it is now. What is equal is not touched: other threads may compute."""
        with ExitStack() as stack:
            for (read, write), value in zip(_SETTINGS, self.values, strict=True):
                present = _read(read)
                if value is not None and value != present:
                    stack.callback(write, present)
                    write(value)
            if self.device != _default_device():
                stack.enter_context(self.device)
            yield


def _default_device() -> torch.device:
    # our hooks switch modes of functions off, and torch then calls the device of one that is on "cpu"
    with EnableTorchFunction():
        return torch.get_default_device()


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (
        AttributeError,
        RuntimeError,
    ):  # this build has no such setting, or the program has set it by its old and its new name
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """State of torch's default generators, Python's and NumPy's.

    Attributes:
        cpu: of torch on the CPU, uint8.
        cuda: of each CUDA device, uint8; empty where CUDA is not in use.
        python, numpy: of theirs; None where they are left alone.
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...] = ()
    python: Any = None
    numpy: Any = None

    @staticmethod
    def now() -> "RandomState":
        """The present state; does not initialise CUDA and does not wait for it."""
        devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        generator = sys.modules.get("numpy.random")  # an attribute of numpy would import it
        return RandomState(
            cpu=torch.get_rng_state(),
            cuda=tuple(one.get_state() for one in devices),
            python=random.getstate(),
            numpy=generator.get_state() if generator is not None else None,
        )

    def restore(self) -> None:
        """Puts the generators into this state."""
        torch.set_rng_state(self.cpu)
        for generator, state in zip(torch.cuda.default_generators, self.cuda, strict=False):
            generator.set_state(state)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
