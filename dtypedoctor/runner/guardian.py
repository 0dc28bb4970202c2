"""Ends a script whose doctor was killed, with all that it has started."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from dtypedoctor.runner import ending

__all__ = ["Guardian"]

_PROGRAM = Path(ending.__file__)
"""Waits at a pipe of which the doctor has the other end."""


class Guardian:
    """A process beside the script that notices when this one is killed, even by SIGKILL. Use as a context manager.

    It is no parent, child or thread of the script, which so runs as it would alone. Where the block is left by an exception
    the script is ended as well.

    Args:
        process: the script, the first of a process group.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def __enter__(self) -> Self:
        source, self._end = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), str(self._process.pid)],
                stdin=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._end_script()
            raise
        finally:
            os.close(source)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._end_script()
        with contextlib.suppress(OSError):
            os.write(self._end, b".")
        os.close(self._end)
        self._guardian.wait()

    def _end_script(self) -> None:
        if self._process.poll() is None:
            ending.end(self._process.pid)
            self._process.wait()
