"""A page of memory shared with a file: where the process is, and why it stopped recording.

Writing to it takes no system call and no space on the disk, so it tells of what happened when nothing else could be written.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "CURSOR",
    "CURSOR_FORMAT",
    "CURSOR_MAGIC",
    "CursorPage",
    "Stopped",
    "read_entered",
    "read_mark",
    "read_stopped",
]

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
_PAGE = 4096


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
        if path is None:
            self._page = mmap.mmap(-1, _PAGE)
            return
        with path.open("xb+", buffering=0) as file:
            if file.write(bytes(_PAGE)) != _PAGE:
                raise OSError(28, "No space left on device")
            self._page = mmap.mmap(file.fileno(), _PAGE)

    @classmethod
    def memory_only(cls) -> "CursorPage":
        """A page without a file."""
        return cls(None)

    def mark(self, n: int, step: int, call: int, site: int) -> None:
        """Notes where the process is."""
        CURSOR_FORMAT.pack_into(self._page, 0, n, step, call, site, CURSOR_MAGIC)

    def stopped(self, errno: int, lost: int) -> None:
        """Notes that nothing is recorded any more, and how many records that has cost so far."""
        _STOPPED.pack_into(self._page, _STOPPED_AT, errno, lost, CURSOR_MAGIC)

    def entered(self, collectives: int) -> None:
        """Notes how many collectives were entered so far."""
        _ENTERED.pack_into(self._page, _ENTERED_AT, collectives, CURSOR_MAGIC)

    def close(self) -> None:
        """Lets go of the page."""
        self._page.close()


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
