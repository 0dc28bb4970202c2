"""The float32 program beside the real one: what each tensor of an op trace would hold had everything since its start been float32.

An operator run again on the operands that it got says whether that operator needs a wider dtype. It does not say whether those
operands are what they should be: an epsilon of 1e-12 is 0 in float16, and 0/0 is NaN in every dtype. So each operator that takes
part in half precision is run a second time on what its operands would be in float32, back to the weights and inputs that were
there when the trace began, and its result is kept beside the real one as long as there is room.
"""

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import tree_map, without_autocast
from dtypedoctor.instrument.operators import (
    Arguments,
    TensorIds,
    bytes_of,
    fits,
    for_wider,
    keep_written,
    leaves_memory_as_it_was,
    tensors_of,
    written,
)
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.interruptions import contained

MAX_HELD = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Bytes of float32 values that are kept on a device. Those of tensors that are gone go first, then the oldest; where they are missing the
real value stands for them."""
SMALL = 4096
"""Elements of the largest tensor whose float32 original is kept when it is cast and elements of it are lost."""

HALF = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)


class Originals:
    """The float32 values of small tensors that a cast to half precision has rounded to 0 or to inf."""

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def cast(self, original: Tensor, result: Tensor) -> None:
        """``result`` is to hold ``original`` in its own, narrower dtype."""
        if not _is_small_cast(original, result):
            return
        exact = original.detach().float()
        rounded = exact.to(result.dtype).float()
        if bool(((rounded == 0) & (exact != 0) | (rounded.isinf() & exact.isfinite())).any()):
            self._held.append((weakref.ref(result), exact.clone()))

    def of(self, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Those of ``tensors`` that still hold what a cast has left of their original, with the original."""
        known = {id(tensor): original for ref, original in self._held if (tensor := ref()) is not None}
        found = [(t, known[id(t)]) for t in tensors if id(t) in known]
        return [(t, o) for t, o in found if t.shape == o.shape and torch.equal(o.to(t.dtype), t.detach())]


def _is_small_cast(original: Tensor, result: Tensor) -> bool:
    wide = measurable(original) and original.dtype in (torch.float32, torch.float64)
    return wide and measurable(result) and result.dtype in HALF and 0 < original.numel() <= SMALL


class Float32Program:
    """Keeps the float32 values of an op trace's tensors by their numbers.

    Args:
        ids: numbers the tensors; the same as the op trace's.
    """

    def __init__(self, ids: TensorIds) -> None:
        self._ids = ids
        self._values: OrderedDict[int, tuple[Tensor, StorageWeakRef]] = OrderedDict()
        self._bytes = 0

    def forget(self) -> None:
        """The window is closed."""
        self._values.clear()
        self._bytes = 0

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """``tensor`` would hold ``value``."""
        self._keep(tensor, value)

    def follow(self, func: Any, arguments: Arguments, numbers: list[int], results: list[Tensor]) -> list[Tensor] | None:
        """Runs ``func`` on the float32 values of its operands and keeps what comes of it.

        Args:
            func: the operator.
            arguments: what it was given, with copies of what it has written to.
            numbers: the numbers that the tensors among the arguments had before the call, in order.
            results: what it returned (or wrote to).

        Returns:
            The float32 results, in the order of ``results``; None where they are those of the real run, or cannot be had.
        """
        operands = tensors_of(arguments)
        held = {id(t): self._values[n][0] for t, n in zip(operands, numbers, strict=True) if n in self._values}
        if not self._takes_part(func, held, operands, results):
            return None
        copied = [t for t in operands if t.dtype in HALF and id(t) not in held]
        if not fits(bytes_of([*copied, *results], 4), results[0].device):
            return None
        exact = _run(func, arguments, held)
        if exact is None or len(exact) != len(results):
            return None
        for real, other in zip(results, exact, strict=True):
            if measurable(real) and measurable(other) and real.shape == other.shape:
                self._keep(real, other)
        return exact

    def lost(self, tensor: Tensor) -> int:
        """How many elements of ``tensor`` are 0 that would not be."""
        value, _ = self._values.get(self._ids.of(tensor)[0], (None, None))
        if value is None or value.shape != tensor.shape:
            return 0
        return int((tensor.eq(0) & value.ne(0)).sum())

    def _takes_part(self, func: Any, held: dict[int, Tensor], operands: list[Tensor], results: list[Tensor]) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False  # it would draw from the program's random numbers
        if leaves_memory_as_it_was(func) or not results:
            return False
        return bool(held) or any(t.dtype in HALF for t in (*operands, *results))

    def _keep(self, tensor: Tensor, value: Tensor) -> None:
        number, room = self._ids.of(tensor)[0], MAX_HELD.get(value.device.type, MAX_HELD["cpu"])
        self._drop(number)
        self._bytes += value.nbytes
        self._values[number] = value, StorageWeakRef(tensor.untyped_storage())
        if self._bytes > room:
            for gone in [n for n, (_, memory) in self._values.items() if memory.expired()]:
                self._drop(gone)
        while self._bytes > room and self._values:
            self._drop(next(iter(self._values)))

    def _drop(self, number: int) -> None:
        if number in self._values:
            value, _ = self._values.pop(number)
            self._bytes -= value.nbytes


def _run(func: Any, arguments: Arguments, held: dict[int, Tensor]) -> list[Tensor] | None:
    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) in held:
            return held[id(value)]
        if measurable(value):
            return value.float() if value.dtype in HALF else value
        return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value

    args, kwargs = keep_written(func, for_wider(func, tree_map(widened, arguments)))
    with contained() as trial, torch.no_grad(), without_autocast():
        result = func(*args, **kwargs)
    if trial.error is not None:  # an operator without a float32 form: the real value stands for its result
        return None
    return tensors_of(result) or written(func, (args, kwargs))
