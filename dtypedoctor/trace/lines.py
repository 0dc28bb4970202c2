"""What a trace is made of on disk: lines with a checksum and a number on each, and a page of memory that is shared with a file.

A seal is the last element of a line that is an array, and the member ``~`` of one that is an object; the line stays JSON.
It holds, in eight hexadecimal digits, the CRC-32 of the line without it, XOR the number of the line in its file, from 1, times
an odd constant modulo 2**32. So a damaged, lost, doubled or moved line is detected, the number can be computed back, and one
changed bit of a seal makes an impossible number of it.

A line is handed to the kernel as a whole, and never written to another file.

The program that is watched may close any descriptor (daemons close all that they find), and the next file that it opens then has
that number. So the file is known by its identity, which is asked for before each line: a system call that reads no disk.

The page says where the process is, and why it stopped recording. Writing to it takes no system call and no space on the disk, so it tells of what
happened when nothing else could be written.
"""

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from errno import EBADF
from fcntl import F_DUPFD_CLOEXEC, fcntl
from os import close, fstat, write
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from dtypedoctor.interruptions import is_interruption
from dtypedoctor.trace.events import Stopped

EVENTS = "events.jsonl"
"""The main file of a trace, in its directory."""

_OBJECT, _ARRAY = b',"~":"', b',"'
_DIGITS = 8
_MASK = 0xFFFFFFFF
_SPREAD = 0x9E3779B1
_GATHER = pow(_SPREAD, -1, _MASK + 1)
_AWAY = 1 << 16
"""How far from its place a line may say that it belongs; a larger number is taken for damage."""
_SHOWN = 5
_LOOKED_AT = 64
"""First lines of a file of which one with a seal says that all must have one."""


def seal(body: bytes, number: int) -> bytes:
    """``body``, a JSON array or object that is not empty, with its seal as line ``number``."""
    mark = _OBJECT if body[-1:] == b"}" else _ARRAY
    return b'%b%b%08x"%b' % (body[:-1], mark, crc32(body) ^ (number * _SPREAD & _MASK), body[-1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The lines of a file without their seals.

    Attributes:
        lines: number of each line and the line, in the order in which they were written.
        bad: places (from 1) of lines that are damaged.
        missing: lines that are nowhere in the file.
        doubled: lines that were passed over because they are there already.
        sealed: whether the file has seals at all.
    """

    lines: tuple[tuple[int, bytes], ...]
    bad: tuple[int, ...] = ()
    missing: int = 0
    doubled: int = 0
    sealed: bool = True

    def damage(self) -> Iterator[str]:
        """A sentence for each kind of damage."""
        yield from unreadable(self.bad)
        if self.missing:
            yield f"{self.missing} record(s) are missing"
        if self.doubled:
            yield f"{self.doubled} record(s) stood there twice"
        if self.lines and not self.sealed:
            yield "its records carry no checksums, so a changed one would not be noticed"


def unreadable(places: Sequence[int]) -> Iterator[str]:
    """A sentence that counts damaged lines and names the first of them."""
    if places:
        shown = ", ".join(map(str, sorted(places)[:_SHOWN])) + (", …" if len(places) > _SHOWN else "")
        yield f"{len(places)} unreadable line(s): {shown}"


def open_lines(data: bytes, expected: int = 0) -> Opened:
    """Takes the seals off the whole lines of ``data``; a torn line at its end is passed over.

    Lines of a file without any seal are returned as they are. Lines that ``data`` must have, and does not, are missing.
    """
    whole, _, _torn = data.rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    if not any(_parts(line) for line in lines[:_LOOKED_AT]):
        numbered = tuple(enumerate(lines, start=1))
        return Opened(lines=numbered, missing=max(0, expected - len(lines)), sealed=False)
    found: dict[int, bytes] = {}
    bad: list[int] = []
    doubled = 0
    for place, line in enumerate(lines, start=1):
        parts = _parts(line)
        number = (crc32(parts[0]) ^ parts[1]) * _GATHER & _MASK if parts else 0
        if parts is None or number < 1 or abs(number - place) > _AWAY:
            bad.append(place)
        elif number in found:
            doubled += 1
        else:
            found[number] = parts[0]
    last = max(expected, *found) if found else expected
    return Opened(
        lines=tuple(sorted(found.items())),
        bad=tuple(bad),
        missing=max(0, last - len(found) - sum(place <= last for place in bad)),
        doubled=doubled,
    )


def _parts(line: bytes) -> tuple[bytes, int] | None:
    """The line without its seal, and what the seal says; None where there is none."""
    mark, end = (_OBJECT, b"}") if line[-1:] == b"}" else (_ARRAY, b"]")
    begin = len(line) - len(mark) - _DIGITS - 2
    if begin < 1 or line[begin : begin + len(mark)] != mark or line[-2:] != b'"' + end:
        return None
    try:
        return line[:begin] + end, int(line[-2 - _DIGITS : -2], 16)
    except ValueError:
        return None


_OUT_OF_THE_WAY = 512
"""Lowest number of our descriptors: the program's own get those that they would have without us."""
_IDENTITY = slice(1, 3)
"""Where inode and device stand in the result of ``fstat``."""


class Lines:
    """A file of lines. It has no buffer, so a process that is killed at any moment leaves whole lines and at most one torn one.

    Where its descriptor has been closed by somebody else, it is opened again, if the path still leads to the same file.

    Args:
        path: must not exist yet; None for lines that are not kept.
        anew: an existing file is taken and emptied.

    Raises:
        FileExistsError: it exists.
        OSError: it cannot be created.
    """

    def __init__(self, path: Path | None, *, anew: bool = False) -> None:
        self.size = 0
        """Bytes written."""
        self.whole = 0
        """Number of the last line."""
        self._path = path.absolute() if path is not None else None
        if self._path is not None:
            self._descriptor = open_out_of_the_way(self._path, os.O_CREAT | (os.O_TRUNC if anew else os.O_EXCL))
            self._identity = fstat(self._descriptor)[_IDENTITY]

    def append(self, *bodies: bytes) -> None:
        """Writes lines by one system call; two threads may do so at once, and a signal handler while it interrupts this very function.

        Raises:
            OSError: they were not written, or only the beginning of them.
        """
        if self._path is None:
            return
        written, count = 0, len(bodies)
        while not written:
            before = self.whole
            after = before + count
            data = b"\n".join((*map(seal, bodies, range(before + 1, after + 1)), b""))
            if not self._is_ours():
                self._open_again()
            # Neither another thread nor a signal handler runs between here and the system call: nothing is called.
            if before == self.whole:
                self.whole = after
                try:
                    written = write(self._descriptor, data)
                except OSError as error:
                    if not is_interruption(error):
                        self.whole -= count
                    raise
        self.size += len(data)
        while written < len(data):  # where there is room for a part only, trying to write the rest tells why
            written += write(self._descriptor, data[written:])

    def moved(self, path: Path) -> None:
        """The file has another name now."""
        if self._path is not None:
            self._path = path.absolute()

    def close(self) -> None:
        """Closes the file."""
        path, self._path = self._path, None
        if path is not None and self._is_ours():
            close(self._descriptor)

    def _is_ours(self) -> bool:
        try:
            return fstat(self._descriptor)[_IDENTITY] == self._identity
        except OSError as error:
            if is_interruption(error):
                raise
            return False

    def _open_again(self) -> None:
        """Opens the file, whose descriptor has been closed; what has its number now belongs to the program.

        Raises:
            OSError: it is not there any more.
        """
        if self._path is None:  # it was closed meanwhile
            raise OSError(EBADF, os.strerror(EBADF))
        descriptor = open_out_of_the_way(self._path)
        if fstat(descriptor)[_IDENTITY] != self._identity:
            close(descriptor)
            raise OSError(EBADF, os.strerror(EBADF))
        self._descriptor = descriptor


def open_out_of_the_way(path: Path, flags: int = 0) -> int:
    """Opens a file for appending, with a descriptor that no program is waiting for; its number.

    Raises:
        OSError: it cannot be opened.
    """
    low = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
    try:
        high = fcntl(low, F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    except OSError:  # so many are not allowed here
        return low
    close(low)
    return high


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
PAGE = 4096
_CHANNELS = (PAGE - _CALLED_AT) // _CALLED.size

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_READ_WRITE, _SHARED = 3, 1
_FAILED = ctypes.c_void_p(-1).value


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
        self.page: Any = bytearray(PAGE)
        """What :data:`CURSOR_FORMAT` is packed into."""
        if path is None:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            if os.write(descriptor, bytes(PAGE)) != PAGE:
                raise OSError(28, "No space left on device")
            self._mapped = _mapped(descriptor)
        finally:
            os.close(descriptor)
        self.page = (ctypes.c_char * PAGE).from_address(self._mapped)

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
        self.page = bytearray(PAGE)
        mapped, self._mapped = self._mapped, 0
        if mapped:
            _libc.munmap(mapped, PAGE)


def _mapped(descriptor: int) -> int:
    """Address of the first page of a file, shared with it.

    Python's ``mmap`` keeps a descriptor until it is closed (before 3.13 always): a program that closes all descriptors would
    then have its own file closed by it.

    Raises:
        OSError: it cannot be mapped.
    """
    address: int | None = _libc.mmap(None, PAGE, _READ_WRITE, _SHARED, descriptor, 0)
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
    counts = [count for (count,) in _CALLED.iter_unpack(data[_CALLED_AT:PAGE])] if len(data) >= PAGE else []
    used = max((number for number, count in enumerate(counts, 1) if count), default=0)
    return tuple(counts[:used])
