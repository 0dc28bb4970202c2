"""This process's standard streams, none of which can end a command: their reader may go, and not every one takes every character."""

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

__all__ = ["standard_streams", "write_document"]

_DESCRIPTORS = (0, 1, 2)


class _Descriptor(io.RawIOBase):
    """Writes to a descriptor. What cannot be written is lost, and the first reason is kept in ``trouble``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.trouble: OSError | None = None

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """It can be written to."""
        return True

    def write(self, data: Any) -> int:
        """Writes some of ``data``; all of it is taken for written once something could not be."""
        while self.trouble is None:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # somebody has made it so; all that means is that its reader is slow
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.trouble = error
        return len(data)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Inside, whatever is printed is printed as far as that is possible, and never raises.

    A descriptor that is closed is opened on ``/dev/null``, so that no file of ours gets its number; a character that the
    stream's encoding lacks becomes ``?``.
    """
    for descriptor in _DESCRIPTORS:
        _open_if_closed(descriptor)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _patient(sys.stdout, 1), _patient(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def write_document(text: str) -> OSError | None:
    """Writes a document to standard output, in UTF-8 whatever the terminal has; what went wrong, if its reader is still there."""
    sys.stdout.flush()
    sys.stdout.buffer.write((text if text.endswith("\n") else text + "\n").encode("utf-8", "backslashreplace"))
    sys.stdout.flush()
    trouble = getattr(getattr(sys.stdout.buffer, "raw", None), "trouble", None)
    return trouble if isinstance(trouble, OSError) and not isinstance(trouble, BrokenPipeError) else None


def _open_if_closed(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)


def _patient(stream: TextIO | None, descriptor: int) -> TextIO:
    """The same stream, as one that never raises; one without a descriptor, as tests have it, stays what it is."""
    encoding = "utf-8"
    if stream is not None:
        try:
            stream.flush()
            descriptor, encoding = stream.fileno(), stream.encoding
        except OSError:
            return stream
    raw = _Descriptor(descriptor)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "replace", line_buffering=descriptor == 2 or raw.isatty())
