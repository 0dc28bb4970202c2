"""Measures batches of tensors on a device without ever waiting for it."""

import math
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from dtypedoctor._torch_private import norm_of_each, without_autocast
from dtypedoctor.instrument.statistics import is_permuted, without_repeats

Counts = tuple[float, int, int]
"""Largest finite magnitude, number of NaN, number of inf."""


Asked = tuple[Tensor, int]
"""A tensor of a batch: dense memory of bfloat16, float16 or float32, 16-byte aligned, at least one element; and the index
of the row that must not be finite for it to be read, -1 for none."""


class DeviceRows(Protocol):
    """Measures on one device.

    Attributes:
        limit: most tensors in one batch.
    """

    limit: int

    def make_ready(self, stream: torch.cuda.Stream) -> None:
        """Has a CUDA stream wait until batches can be launched on it; called once for each, before its first batch."""

    def launch(self, batch: Sequence[Asked]) -> int:
        """Queues a batch behind the current stream's work and returns its number.

        Raises:
            RuntimeError: the device no longer answers.
        """

    def index(self, number: int) -> int:
        """The row that can be a gate for later batches: of the first tensor in batch ``number``; the others' follow it."""

    def arrived(self, number: int, count: int) -> list[Counts] | None:
        """The results of a batch of ``count`` tensors if they are in the host's memory. Asks nothing of the device."""

    def room(self, flying: int) -> bool:
        """Whether another batch can be launched while ``flying`` are on their way."""


_HALF, _UNSIGNED_HALF = struct.Struct("<e"), struct.Struct("<H")
_SINGLE, _UNSIGNED = struct.Struct("<f"), struct.Struct("<I")

DIRECT = {torch.bfloat16: 2, torch.float16: 3, torch.float32: 4}
"""Dtypes of which the kernel reads the memory as it is, and what it calls them."""

_NUMEL_AT, _GATE_AT = 4, 44
"""Where these stand in a description: as ``describe`` of the kernel's module has it, which would be a call for each tensor."""
_SPREAD = 0x5BD1E995


def as_dense(tensor: Tensor) -> Tensor:
    """``tensor`` or a copy of its values in any order, such that its memory can be read as one run of 2- or 4-byte floats.

    float64 is brought to float32 with finite values kept finite. What ``expand`` has repeated is there once.
    """
    if tensor.dtype in DIRECT and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    values = without_repeats(tensor.detach())
    if values.dtype is torch.float64:
        largest = torch.finfo(torch.float32).max
        return torch.where(values.isfinite(), values.clamp(-largest, largest), values).float().contiguous()
    if values.dtype not in DIRECT:
        return values.float().contiguous()
    if not values.is_contiguous() and not is_permuted(values):
        return values.contiguous()
    return values if values.data_ptr() % 16 == 0 else values.clone(memory_format=torch.contiguous_format)


class TritonRows:
    """One kernel launch a batch; the kernel itself puts the results into page-locked memory.

    Args:
        device: a CUDA device.

    Raises:
        ImportError: Triton is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        from dtypedoctor.instrument import extent_kernel

        self._kernel = extent_kernel
        self._device = device
        self.limit = extent_kernel.ROWS
        shape = (extent_kernel.SLOTS, extent_kernel.ROWS, 4)
        self._results = torch.zeros(shape, dtype=torch.int32, device=device)
        self._held = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host: Any = self._held.numpy().view("uint32").reshape(shape[0], -1)
        self._unused = (extent_kernel.describe(2, 0, -1),) * self.limit
        self._unused_address = (self._results.data_ptr(),) * self.limit
        self._chunk = 4 * extent_kernel.CHUNK
        self._compiled: Any = None
        self._programs = extent_kernel.PROGRAMS * (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )
        self._launched = 0
        self._kinds: list[list[torch.dtype]] = [[] for _ in range(shape[0])]
        self._cleared: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._cleared = torch.cuda.Event()
            self._cleared.record(torch.cuda.current_stream(device))

    def make_ready(self, stream: torch.cuda.Stream) -> None:
        """Has ``stream`` wait for the zeros, which the stream that was current first has still to write."""
        if self._cleared is not None:
            stream.wait_event(self._cleared)

    def launch(self, batch: Sequence[Asked]) -> int:
        """Queues a batch behind the current stream's work and returns its number."""
        kernel = self._kernel
        self._launched = number = self._launched + 1
        slot = number % kernel.SLOTS
        self._host[slot] = 0
        self._kinds[slot] = [tensor.dtype for tensor, _ in batch]
        described, addresses, chunks = [], [], 0
        for tensor, gate in batch:
            kind, numel = DIRECT[tensor.dtype], tensor.numel()
            described.append(kernel.FLAG | kind | numel << _NUMEL_AT | (gate + 1) << _GATE_AT)
            addresses.append(tensor.data_ptr())
            size = numel * (4 if kind == DIRECT[torch.float32] else 2)
            chunks += (size + self._chunk - 1) // self._chunk
        missing = self.limit - len(batch)
        with self._on_device():
            self._run(
                min(chunks, self._programs),
                (*addresses, *self._unused_address[:missing]),
                (*described, *self._unused[:missing]),
                kernel.FLAG | (number & 0x7FFFFFFF),
                kernel.FLAG | chunks,
            )
        return number

    def _run(
        self, programs: int, addresses: tuple[int, ...], described: tuple[int, ...], tag: int, chunks: int
    ) -> None:
        """Launches through what was compiled for the first launch: Triton's own way takes several times as long on the host.

        It looks at each argument whether code should be compiled for its value; nothing here is specialised on but that
        addresses are multiples of 16, which holds for all.
        """
        kernel = self._kernel
        fixed = (kernel.ROWS, kernel.SLOTS, kernel.WORDS, kernel.TILES)
        if self._compiled is None:
            self._compiled = kernel.measure_rows[(programs,)](
                addresses, described, self._results, self._held.data_ptr(), tag, chunks, *fixed, num_warps=kernel.WARPS
            )
        else:
            self._compiled[(programs, 1, 1)](
                addresses, described, self._results.data_ptr(), self._held.data_ptr(), tag, chunks, *fixed
            )

    def _on_device(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda" or torch.cuda.current_device() == self._device.index:
            return nullcontext()
        return torch.cuda.device(self._device)

    def index(self, number: int) -> int:
        """The row of a batch's first tensor."""
        return int(number % self._kernel.SLOTS * self.limit)

    def arrived(self, number: int, count: int) -> list[Counts] | None:
        """The results of a batch if they are in the host's memory."""
        slot, tag = number % self._kernel.SLOTS, number & 0x7FFFFFFF
        words = self._host[slot, : count * 4].tolist()
        found = []
        kinds = self._kinds[slot][:count]
        for kind, bits, nan, inf, check in zip(kinds, words[::4], words[1::4], words[2::4], words[3::4], strict=True):
            # the same as check_of() there
            if check != ((bits ^ (nan << 8) ^ (inf << 16) ^ tag) * _SPREAD) & 0xFFFFFFFF:
                return None
            if kind is torch.float16:
                found.append((_HALF.unpack(_UNSIGNED_HALF.pack(bits))[0], nan, inf))
            else:
                wide = bits << 16 if kind is torch.bfloat16 else bits
                found.append((_SINGLE.unpack(_UNSIGNED.pack(wide))[0], nan, inf))
        return found

    def room(self, flying: int) -> bool:
        """Whether a slot is free for another batch."""
        return flying < self._kernel.SLOTS // 2


class NormRows:
    """Maximum norms by torch alone, for devices without Triton: slower, and it only knows that something was not finite.

    A tensor with NaN counts as one NaN, one with inf as one inf, and its largest finite magnitude is given as 0. Gates are
    ignored: everything is read.

    Args:
        device: any device that copies to page-locked memory without waiting.
    """

    limit = 64
    _SLOTS = 1024
    _NOT_YET = -1.0

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.full((self._SLOTS, self.limit), self._NOT_YET, pin_memory=pinned)
        self._launched = 0

    def make_ready(self, stream: torch.cuda.Stream) -> None:
        """Nothing has to be waited for: the results have no memory on the device."""

    def launch(self, batch: Sequence[Asked]) -> int:
        """Queues a batch behind the current stream's work and returns its number."""
        self._launched += 1
        row = self._host[self._launched % self._SLOTS]
        row.fill_(self._NOT_YET)
        with torch.no_grad(), without_autocast():
            norms = norm_of_each([tensor for tensor, _ in batch], math.inf, torch.float32)
            row[: len(batch)].copy_(torch.stack(list(norms)), non_blocking=True)
        return self._launched

    def index(self, number: int) -> int:
        """The row of a batch's first tensor, although nothing asks for it."""
        return number % self._SLOTS * self.limit

    def arrived(self, number: int, count: int) -> list[Counts] | None:
        """The results of a batch if they are in the host's memory."""
        found = self._host[number % self._SLOTS, :count].tolist()
        if self._NOT_YET in found:
            return None
        return [(0.0, int(math.isnan(v)), int(math.isinf(v))) if not math.isfinite(v) else (v, 0, 0) for v in found]

    def room(self, flying: int) -> bool:
        """Whether a slot is free for another batch."""
        return flying < self._SLOTS - 1


def device_rows(device: torch.device) -> DeviceRows:
    """The best that there is for ``device``."""
    if device.type != "cuda":
        return NormRows(device)
    try:
        return TritonRows(device)
    except ImportError:
        return NormRows(device)
