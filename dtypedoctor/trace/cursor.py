"""A page of memory shared with a file: where the process is, and why it stopped recording.

Writing to it takes no system call and no space on the disk, so it tells of what happened when nothing else could be written.
"""

import ctypes
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

CURSOR = "cursor.bin"
CURSOR_FORMAT = struct.Struct("<QIIII")
"""Sequence number, step, call, site, magic: where the process is at this moment."""
CURSOR_MAGIC = 0xD7D0C708

_STOPPED = struct.Struct("<IQI")
"""Error number, records that were not written, magic."""
_STOPPED_AT = 64
_ENTERED = struct.Struct("<QI")
"""Collectives that were entered, magic."""
_ENTERED_AT = 128
_CALLED = struct.Struct("<Q")
"""Collectives and messages that were called on one channel, one after the other in the order of their first records."""
_CALLED_AT = 256
_PAGE = 4096
_CHANNELS = (_PAGE - _CALLED_AT) // _CALLED.size

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_READ_WRITE, _SHARED = 3, 1
_FAILED = ctypes.c_void_p(-1).value


class Stopped(NamedTuple):
    """The recording stopped before the process did."""

    errno: int
    lost: int


class Mark(NamedTuple):
    """The module that is being entered."""

    n: int
    step: int
    call: int
    site: int


class CursorPage:
    """The page of a process that is recorded.

    The whole page is written when it is made: on a full disk, touching a page that the file system has no room for would end
    the process with SIGBUS.

    Args:
        path: must not exist yet.

    Raises:
        OSError: it cannot be created. ``memory_only`` makes a page that nobody else can see, for that case.
    """

    def __init__(self, path: Path | None) -> None:
        self._mapped = 0
        self.page: Any = bytearray(_PAGE)
        """What :data:`CURSOR_FORMAT` is packed into."""
        if path is None:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            if os.write(descriptor, bytes(_PAGE)) != _PAGE:
                raise OSError(28, "No space left on device")
            self._mapped = _mapped(descriptor)
        finally:
            os.close(descriptor)
        self.page = (ctypes.c_char * _PAGE).from_address(self._mapped)

    @classmethod
    def memory_only(cls) -> "CursorPage":
        """A page without a file."""
        return cls(None)

    def stopped(self, errno: int, lost: int) -> None:
        """Notes that nothing is recorded any more, and how many records that has cost so far."""
        _STOPPED.pack_into(self.page, _STOPPED_AT, errno, lost, CURSOR_MAGIC)

    def entered(self, collectives: int) -> None:
        """Notes how many collectives were entered so far."""
        _ENTERED.pack_into(self.page, _ENTERED_AT, collectives, CURSOR_MAGIC)

    def called(self, channel: int, count: int) -> None:
        """Notes how many collectives were called on the ``channel``-th channel so far; of the first few hundred channels only."""
        if channel < _CHANNELS:
            _CALLED.pack_into(self.page, _CALLED_AT + channel * _CALLED.size, count)

    def close(self) -> None:
        """Lets go of the page; what is noted from now on goes nowhere."""
        self.page = bytearray(_PAGE)
        mapped, self._mapped = self._mapped, 0
        if mapped:
            _libc.munmap(mapped, _PAGE)


def _mapped(descriptor: int) -> int:
    """Address of the first page of a file, shared with it.

    Python's ``mmap`` keeps a descriptor until it is closed (before 3.13 always): a program that closes all descriptors would
    then have its own file closed by it.

    Raises:
        OSError: it cannot be mapped.
    """
    address: int | None = _libc.mmap(None, _PAGE, _READ_WRITE, _SHARED, descriptor, 0)
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    assert address is not None
    return address


def read_mark(data: bytes) -> Mark | None:
    """Where the process was; None where it entered no module, or the bytes are no cursor."""
    if len(data) < CURSOR_FORMAT.size:
        return None
    *mark, magic = CURSOR_FORMAT.unpack_from(data)
    return Mark(*mark) if magic == CURSOR_MAGIC else None


def read_stopped(data: bytes) -> Stopped | None:
    """Why it stopped recording; None where it did not."""
    if len(data) < _STOPPED_AT + _STOPPED.size:
        return None
    errno, lost, magic = _STOPPED.unpack_from(data, _STOPPED_AT)
    return Stopped(errno, lost) if magic == CURSOR_MAGIC else None


def read_entered(data: bytes) -> int | None:
    """How many collectives it had entered; None where nobody has counted."""
    if len(data) < _ENTERED_AT + _ENTERED.size:
        return None
    collectives, magic = _ENTERED.unpack_from(data, _ENTERED_AT)
    return int(collectives) if magic == CURSOR_MAGIC else None


def read_called(data: bytes) -> tuple[int, ...]:
    """How many collectives were called on each channel, up to the last one that has any."""
    counts = [count for (count,) in _CALLED.iter_unpack(data[_CALLED_AT:_PAGE])] if len(data) >= _PAGE else []
    used = max((number for number, count in enumerate(counts, 1) if count), default=0)
    return tuple(counts[:used])
