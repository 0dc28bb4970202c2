"""The lines of a trace's files: a checksum and a number on each, and how they are appended to a file.

A seal is the last element of a line that is an array, and the member ``~`` of one that is an object; the line stays JSON.
It holds, in eight hexadecimal digits, the CRC-32 of the line without it, XOR the number of the line in its file, from 1, times
an odd constant modulo 2**32. So a damaged, lost, doubled or moved line is detected, the number can be computed back, and one
changed bit of a seal makes an impossible number of it.

A line is handed to the kernel as a whole, and never written to another file.

The program that is watched may close any descriptor (daemons close all that they find), and the next file that it opens then has
that number. So the file is known by its identity, which is asked for before each line: a system call that reads no disk.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from errno import EBADF
from fcntl import F_DUPFD_CLOEXEC, fcntl
from os import close, fstat, write
from pathlib import Path
from zlib import crc32

from dtypedoctor.interruptions import is_interruption

EVENTS = "events.jsonl"
"""The main file of a trace, in its directory."""

_OBJECT, _ARRAY = b',"~":"', b',"'
_DIGITS = 8
_MASK = 0xFFFFFFFF
_SPREAD = 0x9E3779B1
_GATHER = pow(_SPREAD, -1, _MASK + 1)
_AWAY = 1 << 16
"""How far from its place a line may say that it belongs; a larger number is taken for damage."""
_CLOSING = b"]"[0]
_ARRAY_END, _DIGITS_AT = -len(_ARRAY) - _DIGITS - 2, slice(-2 - _DIGITS, -2)
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
    return (_intact(lines) if len(lines) >= expected else None) or _checked(lines, expected)


def _intact(lines: list[bytes]) -> Opened | None:
    """The lines of a file in which nothing is damaged; None for another. Nearly all files are, and most lines are arrays."""
    bodies = []
    spread = 0
    for line in lines:
        spread = spread + _SPREAD & _MASK
        try:
            if line[-1] == _CLOSING and crc32(body := line[:_ARRAY_END] + b"]") ^ int(line[_DIGITS_AT], 16) == spread:
                bodies.append(body)
                continue
        except (ValueError, IndexError):
            return None
        parts = _parts(line)
        if parts is None or crc32(parts[0]) ^ parts[1] != spread:
            return None
        bodies.append(parts[0])
    return Opened(lines=tuple(enumerate(bodies, start=1)))


def _checked(lines: list[bytes], expected: int) -> Opened:
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
            data = b"".join([seal(body, number) + b"\n" for number, body in enumerate(bodies, before + 1)])
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
