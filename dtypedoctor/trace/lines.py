"""Appends sealed lines to a file, each handed to the kernel as a whole."""

import os
from itertools import count
from pathlib import Path

from dtypedoctor.trace.seal import seal

__all__ = ["Lines"]


class Lines:
    """A new file of lines. It has no buffer, so a process that is killed at any moment leaves whole lines and at most one torn one.

    Args:
        path: must not exist yet; None for lines that are not kept.

    Raises:
        FileExistsError: it exists.
        OSError: it cannot be created.
    """

    def __init__(self, path: Path | None) -> None:
        kept = path is not None
        self._file = (path or Path(os.devnull)).open("xb" if kept else "wb", buffering=0)
        self._numbers = count(1)
        self.size = 0
        """Bytes written."""
        self.whole = 0
        """Number of a line that is written as a whole, and of the last one where no two threads write at once."""

    def append(self, body: bytes) -> None:
        """Writes one line; two threads may do so at once.

        Raises:
            OSError: the line was not written, or only the beginning of it.
        """
        number = next(self._numbers)
        line = seal(body, number) + b"\n"
        self.size += len(line)
        while line:  # where there is room for a part only, trying to write the rest tells why
            line = line[self._file.write(line) or 0 :]
        self.whole = number

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
