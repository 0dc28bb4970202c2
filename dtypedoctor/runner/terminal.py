"""Lets a script use the terminal as if it had been started from the shell."""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
from typing import Self

STDIN = 0
_SIZE = struct.Struct("HHHH")
_OUTPUT_FLAGS = 1
"""Place of the output flags in what ``tcgetattr`` returns."""


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


class Foreground:
    """Gives the terminal to a process group, so that it can read from it, and Ctrl-C and Ctrl-Z go to it alone.

    Does nothing where standard input is not this process's terminal. Use as a context manager.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.is_ours = _is_ours()
        """Whether there is a terminal to give."""

    def __enter__(self) -> Self:
        self.give()
        if self.is_ours:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGCONT)  # it may have been stopped for reading too early
        return self

    def __exit__(self, *_: object) -> None:
        self.take_back()

    def give(self) -> None:
        """The process's group has the terminal from now on."""
        self._give(self._process.pid)

    def take_back(self) -> None:
        """This process's group has it again."""
        self._give(os.getpgrp())

    def _give(self, group: int) -> None:
        if not self.is_ours:
            return
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a background process is stopped for asking
        try:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(STDIN, group)
        finally:
            signal.signal(signal.SIGTTOU, before)


def _is_ours() -> bool:
    """Whether standard input is the terminal that this process is in the foreground of."""
    try:
        return os.isatty(STDIN) and os.tcgetpgrp(STDIN) == os.getpgrp()
    except OSError:
        return False
