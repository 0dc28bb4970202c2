"""Puts tensors of one device together, launches their measurement, and finds the results without waiting.

Those of each stream are launched on it, and only when those of all streams are: FSDP goes to and fro between streams dozens of
times a step, and each launch costs the host more than a module's whole call.

Three rules keep a batch from reading memory that is not, or no longer, the tensor's:

* It is launched on the stream on which its tensors were handed over. That stream's own object is kept: a handle of 0 cannot be
  turned back into the default stream, because ``torch.cuda.ExternalStream(0)`` makes a new stream that waits for nobody.
* The allocator is told which stream reads a tensor as soon as the program uses more than one: memory of another stream's pool is
  given away again when its last owner lets go of it, and that stream does not wait for the batch.
* What has lost its memory since it was handed over (FSDP resizes storages to zero) is left out.
"""

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dtypedoctor._torch_private import base_of, norm_of_each, raw_stream, version_now, without_autocast
from dtypedoctor.instrument.statistics import is_permuted, without_repeats
from dtypedoctor.interruptions import is_interruption
from dtypedoctor.unpatched import monotonic, sleep

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


KEPT_BYTES = 192 << 20
"""Memory of tensors kept alive for a batch: a fraction of what one layer of a large model keeps for its backward pass."""


AHEAD = 4
"""Batches that a device has to be behind for the host to have time for something else."""

_LEFT_BEHIND: list[DeviceRows] = []
"""Those whose device was not done when they were given up: it may still write to their memory, which nobody else may get."""

MOST_UNREAD = 64
"""Batches that are left unread where the host has no time: an eighth of those for which there is room."""


class Row:
    """One tensor, measured once, however many places it is found at.

    Attributes:
        tensor: the tensor until it is launched, then None.
        version: its version when it was handed over.
        stream: handle of the stream that it was handed over on.
        address: where its data lay when it was handed over.
        gate: a row that must not be finite for this one to be measured.
        entries: sequence number, step, call and site of each sample that it is.
        doubts: what to look at if it is not finite.
        counts: the result.
        lost: there will be no result.
        index: where later batches find it as a gate.
    """

    __slots__ = (
        "address",
        "counts",
        "doubts",
        "entries",
        "gate",
        "index",
        "lost",
        "stream",
        "tensor",
        "version",
    )

    def __init__(
        self, tensor: Tensor | None, version: int = 0, address: int = 0, stream: int = 0, gate: "Row | None" = None
    ) -> None:
        self.tensor = tensor
        self.version = version
        self.address = address
        self.stream = stream
        self.gate = gate
        self.entries: tuple[tuple[int, int, int, int], ...] = ()
        self.doubts: tuple[Any, ...] = ()
        self.counts: Counts | None = None
        self.lost = False
        self.index = -1

    @property
    def settled(self) -> bool:
        """Whether nothing more will be known."""
        return self.lost or self.counts is not None

    @property
    def suspicious(self) -> bool:
        """Whether something in it is known not to be finite."""
        return self.counts is not None and bool(self.counts[1] or self.counts[2])


NOWHERE = 1 << 20
"""Below it there is no memory: the address of a tensor whose storage is freed is its offset."""


class Batches:
    """Batches of one CUDA device, launched on the stream that its tensors were handed over on.

    Args:
        rows: measures.
        device: the device.
    """

    def __init__(self, rows: DeviceRows, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._open: dict[int, list[Row]] = {}
        self._changed: list[Row] = []
        self._gated: list[Row] = []
        self._kept = 0
        self.current_stream = _stream_getter(device)
        """Tells the handle of the stream that is current."""
        self.streams: dict[int, torch.cuda.Stream | None] = {}
        """Those that have been current, by their handles."""
        self._home = 0
        self._flying: deque[tuple[int, list[Row]]] = deque()
        self.dead = False
        """Whether the device has stopped to answer."""
        self.dropped = 0
        """Rows that were given up: no room, or the device was dead."""

    @property
    def worth_reading(self) -> bool:
        """Whether the host has time for results, as the device is several batches behind; or has left too many unread."""
        flying = self._flying
        return len(flying) > MOST_UNREAD or (len(flying) > AHEAD and self._rows.arrived(flying[-AHEAD][0], 1) is None)

    @property
    def holds_any(self) -> bool:
        """Whether any rows have been handed over whose results are not read."""
        return bool(self._open or self._gated or self._changed or self._flying)

    def newest(self) -> int:
        """Number of the newest batch that is on its way; -1 where there is none."""
        return self._flying[-1][0] if self._flying else -1

    def begin_call(self) -> None:
        """An outermost module call begins: its stream is the one that modules compute on."""
        self._home = self.stream_now()

    def add(self, tensor: Tensor, gate: Row | None = None) -> Row:
        """Hands over a tensor; it goes with the next batch, behind a gate with the first batch after that of its gate.

        A gate on another stream would not be ready in time: it is ignored.
        """
        try:
            version = version_now(tensor)
        except RuntimeError:
            version = -1
        return self.put(tensor, version, tensor.data_ptr(), self.stream_now(), gate)

    def put(self, tensor: Tensor, version: int, address: int, stream: int, gate: Row | None = None) -> Row:
        """Does the same with a tensor whose version, address and stream were read when it was handed over."""
        size = tensor.nbytes
        if size == 0:
            empty = Row(None)
            empty.counts = (0.0, 0, 0)
            return empty
        if stream != self._home or base_of(tensor) is not None:
            size = tensor.untyped_storage().nbytes()  # all of the memory that it is a part of is kept alive
        if size == 0 or address < NOWHERE:  # FSDP2 has freed its memory, and a kernel that reads there ends the program
            gone = Row(None)
            gone.lost = True
            self._changed.append(gone)
            return gone
        self._kept += size
        if gate is not None:
            tensor = tensor.detach()
            if gate.stream == stream:
                row = Row(tensor, version, address, stream, gate)
                self._gated.append(row)
                return row
        row = Row(tensor, version, address, stream)
        waiting = self._open.get(stream)
        if waiting is None:
            waiting = self._open[stream] = []
        waiting.append(row)
        if len(waiting) >= self._rows.limit or self._kept >= KEPT_BYTES:
            self._launch_open()
        return row

    def stream_now(self) -> int:
        """Handle of the stream that is current."""
        handle = self.current_stream()
        if handle not in self.streams:
            self.meet(handle)
        return handle

    def meet(self, handle: int) -> None:
        """The stream that is current is used for the first time: it has to wait until the results' memory has been cleared."""
        self.streams[handle] = None
        if self._device.type == "cuda":
            self.streams[handle] = stream = torch.cuda.current_stream(self._device)
            self._rows.make_ready(stream)

    def launch(self) -> list[Row]:
        """Launches what has been put together.

        Returns:
            The rows that were left out since this was called last, also where :meth:`add` has launched them, because their tensors
            have been changed in place or freed since they were handed over.
        """
        self._launch_open()
        changed, self._changed = self._changed, []
        return changed

    def _launch_open(self) -> None:
        waiting, self._open = self._open, {}
        self._kept = 0
        # The home stream comes last: results are written in the order of launches, and what modules have returned is only
        # known then if what went into the collectives before it is known as well.
        for stream in sorted(waiting, key=lambda stream: stream == self._home):
            batch = waiting[stream]
            sent = []
            # The newest first: what has just been written is still in the device's cache, until older tensors push it out.
            for row in reversed(batch):
                tensor = row.tensor
                if row.lost:
                    continue
                if tensor is not None and (
                    tensor.data_ptr() != row.address or (row.version >= 0 and row.version != version_now(tensor))
                ):
                    self._changed.append(row)
                    row.lost = True
                else:
                    sent.append(row)
            for first in range(0, len(sent), self._rows.limit):
                self._send_some(sent[first : first + self._rows.limit])
            for row in batch:
                row.tensor = None
        self._let_gated_in()

    def _let_gated_in(self) -> None:
        """The gates of these have been launched, so that a batch from now on can ask for them."""
        waiting, self._gated = self._gated, []
        for row in waiting:
            gate = row.gate
            if gate is not None and (gate.lost or (gate.settled and not gate.suspicious)):
                row.lost = True
                row.tensor = None
            else:
                self._open.setdefault(row.stream, []).append(row)

    def _send_some(self, batch: list[Row]) -> None:
        try:
            number = -1 if self.dead or not self._rows.room(len(self._flying)) else self._launch_on_stream(batch)
        except RuntimeError as error:  # a failed assert on the device: every later call fails too
            if is_interruption(error):
                raise
            self.dead = True
            number = -1
        if number < 0:
            self.dropped += len(batch)
            for row in batch:
                row.lost = True
            return
        for index, row in enumerate(batch, start=self._rows.index(number)):
            row.index = index
        self._flying.append((number, batch))

    def _launch_on_stream(self, batch: list[Row]) -> int:
        """Launches rows of one stream on it."""
        handle = batch[0].stream
        if self._device.type != "cuda":
            return self._rows.launch(_asked(batch))
        stream = self.streams[handle]
        assert stream is not None
        if len(self.streams) > 1:  # where there is one only, its allocator and its order are all that is needed
            for row in batch:
                if row.tensor is not None:
                    row.tensor.record_stream(stream)
        if handle == self.current_stream():
            return self._rows.launch(_asked(batch))
        with torch.cuda.stream(stream):
            return self._rows.launch(_asked(batch))

    def drain(self) -> list[Row]:
        """The rows whose results have arrived since the last time, in the order of their launches."""
        found: list[Row] = []
        while self._flying:
            number, batch = self._flying[0]
            counts = self._rows.arrived(number, len(batch))
            if counts is None:
                break
            self._flying.popleft()
            for row, one in zip(batch, counts, strict=True):
                row.counts = one
            found += batch
        return found

    def wait(self, seconds: float) -> list[Row]:
        """Like :meth:`drain`, but gives what is on its way some time, as long as the device answers."""
        deadline = monotonic() + seconds
        found = self.drain()
        while self._flying and self._answers() and monotonic() < deadline:
            sleep(0.0005)
            found += self.drain()
        found += self.drain()
        if self._flying:
            _LEFT_BEHIND.append(self._rows)
        for _, batch in self._flying:
            self.dropped += len(batch)
            for row in batch:
                row.lost = True
        self._flying.clear()
        return found

    def _answers(self) -> bool:
        if self.dead:
            return False
        try:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).query()
        except RuntimeError as error:
            if is_interruption(error):
                raise
            self.dead = True
        return not self.dead


def _stream_getter(device: torch.device) -> Callable[[], int]:
    """What tells the handle of the stream that is current on ``device``."""
    if device.type != "cuda":
        return lambda: 0
    return partial(raw_stream, device.index)


def _asked(batch: list[Row]) -> list[Asked]:
    found = []
    for row in batch:
        tensor, gate = row.tensor, row.gate
        if tensor is None:
            continue
        if tensor.dtype not in DIRECT or row.address % 16 or not tensor.is_contiguous():
            tensor = as_dense(tensor)
        found.append((tensor, -1 if gate is None or gate.suspicious else gate.index))
    return found
