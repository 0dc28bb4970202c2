"""A file that keeps the beginning and the end of what a process writes, however much that is."""

import os
from pathlib import Path

__all__ = ["KeptOutput"]


def _for_the_user(path: str, flags: int) -> int:
    """Opens a file that nobody else may read: what a program prints is kept as it is, with whatever secrets are in it."""
    return os.open(path, flags, 0o600)


class KeptOutput:
    """Writes to a new file until that is full; from then on it holds the beginning, how much is left out, and the end.

    There is no buffer: at any moment the file holds all of this of what was written so far.

    Attributes:
        head: bytes that are kept of the beginning. A class attribute, so that a test can work with few.
        tail: bytes of the end that are kept at least; at most it is twice as many.

    Args:
        path: must not exist yet.

    Raises:
        OSError: it cannot be created.
    """

    head = 1 << 20
    tail = 2 << 20

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb+", buffering=0, opener=_for_the_user)  # noqa: SIM115
        self._size = 0
        self._left_out = 0
        self._end_at = self.head
        """Where the end begins: behind the words that say what is left out."""

    def write(self, data: bytes) -> None:
        """Appends ``data``.

        Raises:
            OSError: there is no room for it.
        """
        view = memoryview(data)
        while view:
            room = self._end_at + 2 * self.tail - self._size
            written = self._file.write(view[:room]) or 0
            self._size += written
            view = view[written:]
            if self._size == self._end_at + 2 * self.tail:
                self._fold()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _fold(self) -> None:
        """Moves the last bytes to where the end begins, over those before them."""
        last = os.pread(self._file.fileno(), self.tail, self._size - self.tail)
        self._left_out += self._size - self._end_at - len(last)
        words = f"\n[dtypedoctor: {self._left_out:,} bytes of output are left out here]\n".encode()
        self._file.seek(self.head)
        for part in (words, last):
            view = memoryview(part)
            while view:
                view = view[self._file.write(view) or 0 :]
        self._end_at = self.head + len(words)
        self._size = self._end_at + len(last)
        self._file.truncate(self._size)
