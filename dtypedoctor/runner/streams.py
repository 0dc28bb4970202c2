"""Shows what a process writes while it writes it, and keeps it in files."""

import contextlib
import os
import selectors
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from dtypedoctor.runner.child import STDERR, STDOUT
from dtypedoctor.runner.terminal import copy_size, imitation

CHUNK = 65536


@dataclass(frozen=True, slots=True)
class _Pipe:
    source: int
    kept: BinaryIO
    shown: int
    terminal: bool


class Streams:
    """Standard output and error of a process that is about to be started. Use as a context manager.

    Args:
        directory: where ``stdout.txt`` and ``stderr.txt`` are written.
        live: whether what is written is also shown on this process's own output and error, as it comes.
    """

    def __init__(self, directory: Path, *, live: bool) -> None:
        self._kept = [(directory / name).open("xb", buffering=0) for name in (STDOUT, STDERR)]
        self._pipes = [_pipe(kept, shown) for shown, kept in enumerate(self._kept, start=1)] if live else []
        self._selector = selectors.DefaultSelector()
        self._full = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        self._selector.close()
        for kept in self._kept:
            kept.close()

    @contextlib.contextmanager
    def ends(self) -> Iterator[tuple[int, int]]:
        """The descriptors that the process is to get as its output and error; inside, it has to be started."""
        if not self._pipes:
            yield self._kept[0].fileno(), self._kept[1].fileno()
            return
        pipes, ends = zip(*self._pipes, strict=True)
        self._pipes = []
        for pipe in pipes:
            self._selector.register(pipe.source, selectors.EVENT_READ, pipe)
        try:
            yield ends
        finally:
            for end in ends:
                os.close(end)

    def show(self, seconds: float, wake: int) -> None:
        """Shows what comes in until ``seconds`` have passed or the descriptor ``wake`` is readable."""
        for key in list(self._selector.get_map().values()):
            if key.data.terminal:
                copy_size(key.data.shown, key.data.source)
        self._selector.register(wake, selectors.EVENT_READ)
        try:
            for key, _ in self._selector.select(seconds):
                if key.data is not None:
                    self._move(key.data)
        finally:
            self._selector.unregister(wake)

    def show_rest(self) -> None:
        """Shows what is still in the pipes. What other processes write to them later is lost, as they are left behind."""
        for key in list(self._selector.get_map().values()):
            while self._move(key.data):
                pass

    def _move(self, pipe: _Pipe) -> bool:
        """Passes one chunk on; False at the end of the stream, or if there is nothing at the moment."""
        try:
            chunk = os.read(pipe.source, CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # how the end of a pseudo-terminal looks
            chunk = b""
        if not chunk:
            self._close(pipe)
            return False
        self._keep(pipe, chunk)
        try:
            _write_all(pipe.shown, chunk)
        except OSError:  # our reader has gone, so the script's has: it learns that the same way
            self._close(pipe)
            return False
        return True

    def _keep(self, pipe: _Pipe, chunk: bytes) -> None:
        """Writes a chunk to its file. Where there is no room, the program goes on and is shown, and is kept no longer."""
        if self._full:
            return
        try:
            pipe.kept.write(chunk)
        except OSError as error:
            self._full = True
            print(f"dtypedoctor: what is printed is no longer kept: {error.strerror}", file=sys.stderr, flush=True)

    def _close(self, pipe: _Pipe) -> None:
        self._selector.unregister(pipe.source)
        os.close(pipe.source)


def _pipe(kept: BinaryIO, shown: int) -> tuple[_Pipe, int]:
    terminal = os.isatty(shown)
    source, end = imitation(shown) if terminal else os.pipe()
    os.set_blocking(source, False)
    return _Pipe(source, kept, shown, terminal), end


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
