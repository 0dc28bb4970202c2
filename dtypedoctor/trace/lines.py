"""Appends sealed lines to a file, each handed to the kernel as a whole, and never to another file.

The program that is watched may close any descriptor (daemons close all that they find), and the next file that it opens then has
that number. So the file is known by its identity, which is asked for before each line: a system call that reads no disk.
"""

import os
from errno import EBADF
from fcntl import F_DUPFD_CLOEXEC, fcntl
from os import close, fstat, write
from pathlib import Path

from dtypedoctor.interruptions import is_interruption
from dtypedoctor.trace.seal import seal

__all__ = ["Lines", "open_out_of_the_way"]

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

    def append(self, body: bytes) -> None:
        """Writes one line; two threads may do so at once, and a signal handler while it interrupts this very function.

        Raises:
            OSError: the line was not written, or only the beginning of it.
        """
        if self._path is None:
            return
        written = 0
        while not written:
            number = self.whole + 1
            line = seal(body, number) + b"\n"
            if not self._is_ours():
                self._open_again()
            # Neither another thread nor a signal handler runs between here and the system call: nothing is called.
            if number == self.whole + 1:
                self.whole = number
                try:
                    written = write(self._descriptor, line)
                except OSError as error:
                    if not is_interruption(error):
                        self.whole -= 1
                    raise
        self.size += len(line)
        while written < len(line):  # where there is room for a part only, trying to write the rest tells why
            written += write(self._descriptor, line[written:])

    def moved(self, path: Path) -> None:
        """The file has another name now."""
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
