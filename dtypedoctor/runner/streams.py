"""Shows what processes write while they write it, and keeps the beginning and the end of it in files."""

import contextlib
import fcntl
import json
import os
import select
import selectors
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dtypedoctor.foreign_files import write_file
from dtypedoctor.runner.run import STDERR, STDOUT
from dtypedoctor.trace.ranks import STREAMS


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


CHUNK = 65536
_SIZE = struct.Struct("HHHH")
_OUTPUT_FLAGS = 1
"""Place of the output flags in what ``tcgetattr`` returns."""

_COPY = """
import os
os.set_blocking(0, True)
try:
    while chunk := os.read(0, 65536):
        while chunk:
            chunk = chunk[os.write(1, chunk):]
except OSError:
    pass
"""


@dataclass(frozen=True, slots=True)
class _Pipe:
    source: int
    end: int
    kept: KeptOutput
    shown: int | None
    terminal: bool


class Streams:
    """Standard output and error of processes that are about to be started. Use as a context manager.

    Args:
        directory: where ``stdout.txt`` and ``stderr.txt`` of the process are written.
        live: whether what is written is also shown on this process's own output and error, as it comes.
        ranks: directories for those of the processes that the process will start; there they find where to write to.

    Raises:
        OSError: a file cannot be created.
    """

    def __init__(self, directory: Path, *, live: bool, ranks: Sequence[Path] = ()) -> None:
        self._selector = selectors.DefaultSelector()
        self._full = False
        self._kept: list[KeptOutput] = []
        self._pipes = self._of(directory, live=live)
        self.names = {os.readlink(f"/proc/self/fd/{pipe.end}") for pipe in self._pipes}
        """What the processes have as output and error, as their descriptors are named in ``/proc``."""
        self._of_ranks = []
        for place in ranks:
            pair = self._of(place, live=live)
            self._of_ranks += pair
            write_file(place / STREAMS, json.dumps([_address(pipe) for pipe in pair]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        self._close_ends()
        self._selector.close()
        for kept in self._kept:
            kept.close()

    @contextlib.contextmanager
    def ends(self) -> Iterator[tuple[int, int]]:
        """The descriptors that the process is to get as its output and error; inside, it has to be started."""
        out, err = self._pipes
        try:
            yield out.end, err.end
        finally:
            self._pipes = []
            for pipe in (out, err):
                os.close(pipe.end)

    def show(self, seconds: float, wake: int) -> None:
        """Shows what comes in until ``seconds`` have passed or the descriptor ``wake`` is readable."""
        self.resize()
        self._selector.register(wake, selectors.EVENT_READ)
        try:
            for key, _ in self._selector.select(seconds):
                if key.data is not None:
                    self._move(key.data)
        finally:
            self._selector.unregister(wake)

    def resize(self) -> None:
        """Makes the terminals that the processes see as large as the real one."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data.terminal:
                copy_size(key.data.shown, key.data.source)

    def show_rest(self) -> None:
        """Shows what is still in the pipes. Processes that the script has left behind go on writing to where they wrote before."""
        self._close_ends()
        for key in list(self._selector.get_map().values()):
            while self._move(key.data):
                pass
        for key in list(self._selector.get_map().values()):
            _hand_over(key.data)
            self._close(key.data)

    def _of(self, directory: Path, *, live: bool) -> list[_Pipe]:
        pipes = []
        for number, name in enumerate((STDOUT, STDERR), start=1):
            self._kept.append(KeptOutput(directory / name))
            pipes.append(_pipe(self._kept[-1], number if live else None))
            self._selector.register(pipes[-1].source, selectors.EVENT_READ, pipes[-1])
        return pipes

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
            if pipe.shown is not None:
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

    def _close_ends(self) -> None:
        """The ends that this process holds for others; whoever wants one has opened it by now."""
        for pipe in (*self._pipes, *self._of_ranks):
            os.close(pipe.end)
        self._pipes, self._of_ranks = [], []


def _pipe(kept: KeptOutput, shown: int | None) -> _Pipe:
    terminal = shown is not None and os.isatty(shown)
    source, end = imitation(shown) if shown is not None and terminal else os.pipe()
    os.set_blocking(source, False)
    return _Pipe(source, end, kept, shown, terminal)


def imitation(terminal: int) -> tuple[int, int]:
    """A pseudo-terminal as large as ``terminal`` that passes on what is written to it, byte for byte.

    Returns:
        The end to read from, and the end to give to a process.
    """
    source, end = os.openpty()
    attributes = termios.tcgetattr(end)
    attributes[_OUTPUT_FLAGS] &= ~termios.OPOST  # the real terminal turns \n into \r\n
    termios.tcsetattr(end, termios.TCSANOW, attributes)
    copy_size(terminal, source)
    return source, end


def copy_size(terminal: int, imitated: int) -> None:
    """Makes a pseudo-terminal as large as the real one."""
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(_SIZE.size))
        if size != fcntl.ioctl(imitated, termios.TIOCGWINSZ, bytes(_SIZE.size)):
            fcntl.ioctl(imitated, termios.TIOCSWINSZ, size)


def _address(pipe: _Pipe) -> str:
    """The path by which a process of the same user opens the end of a pipe for itself, as long as this process holds it."""
    return os.ttyname(pipe.end) if pipe.terminal else f"/proc/{os.getpid()}/fd/{pipe.end}"


def _hand_over(pipe: _Pipe) -> None:
    """Leaves a pipe to a process that ends with it: closed, it would end a server that the script has started and left."""
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _COPY],
            stdin=pipe.source,
            stdout=pipe.shown if pipe.shown is not None else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # somebody has made it so; all that means is that its reader is slow
            select.select([], [descriptor], [])
