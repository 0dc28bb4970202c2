"""Numbers tensors and the memory they share, so that the chain of ops behind a tensor can be followed.

Python objects do not tell tensors apart: below autograd a view, a saved tensor or a parameter often comes in a new wrapper.
What a tensor is, is its place in memory, how it is read there, and how often that memory was written to.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import memory_key


@dataclass(slots=True)
class _Memory:
    number: int
    held: StorageWeakRef
    """Keeps the address from being given to other memory, without keeping the memory itself."""
    writes: int = 0


class TensorIds:
    """Equal numbers for the same tensor in the same version; writes are told to it by :meth:`wrote`."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._next = 1

    def of(self, tensor: Tensor) -> tuple[int, int]:
        """Number of the tensor, and of its memory (0 for a tensor without any of its own)."""
        memory = self._memory(tensor)
        if memory is None:
            return self._new(), 0
        place = (memory.number, memory.writes, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = self._new()
        return number, memory.number

    def whole(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """What two tensors have in common that are the same elements in any order; None where that cannot be said."""
        memory = self._memory(tensor)
        return None if memory is None else (memory.number, tensor.storage_offset(), tensor.numel(), tensor.dtype)

    def wrote(self, tensor: Tensor) -> None:
        """The memory of ``tensor`` was written to: everything in it is another tensor from now on."""
        memory = self._memory(tensor)
        if memory is not None:
            memory.writes += 1

    def _memory(self, tensor: Tensor) -> _Memory | None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and some wrappers have none
            return None
        key = memory_key(storage)
        found = self._memories.get(key)
        if found is None:
            found = self._memories[key] = _Memory(self._new(), StorageWeakRef(storage))
        return found

    def _new(self) -> int:
        self._next += 1
        return self._next - 1
