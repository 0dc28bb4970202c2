"""Keeps a later run of a script away from what the first one has written.

A training that saves checkpoints and resumes from them, or appends to its log, is another program when it runs a second time: it begins where the
first run ended, and what it writes is not what the user's run wrote. Python's audit events tell of a file before it is opened.
"""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtypedoctor.unpatched import time_ns
from dtypedoctor.worker.on_import import after_import

__all__ = ["FirstRunFiles"]

_CLOCK_STEP = 50_000_000
"""Nanoseconds by which a file's time may lie before the moment of writing; file systems use the coarse clock of the kernel."""
_CODE = (".py", ".pyc", ".so")
"""Suffixes of what is imported: somebody who edits their code while it runs changes nothing that the first run has written."""
_CACHES = ("/.cache/", "/.triton/", "/torchinductor_", "/__pycache__/")
"""Directories of what is computed again where it is missing: whether it is there changes nothing but time."""


class FirstRunFiles:
    """Calls ``found`` with the path of a file from the first run that is about to be read or continued; that it is replaced is all right.

    Args:
        first: directory of the first run.
        own: directory of the run that is beginning.
        found: what to do; must not return if the file is not to be opened.
    """

    def __init__(self, first: Path, own: Path, found: Callable[[str], None]) -> None:
        self._found = found
        self._began = (first / "request.json").stat().st_mtime_ns
        self._ended = time_ns() - _CLOCK_STEP
        places = (str(first.resolve()), str(own.resolve()), sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev")
        self._ours = tuple(f"{place}/" for place in places)

    def begin(self) -> None:
        """Begins to listen; an audit hook cannot be taken back."""
        sys.addaudithook(self._heard)

    def torch_is_there(self) -> None:
        """Torch has been imported: its compiler, which may come later, is to leave the listening alone."""
        from dtypedoctor._torch_private import FRAME_SKIPPER, skip_frames

        after_import(FRAME_SKIPPER, lambda: skip_frames(FirstRunFiles._heard))

    def _heard(self, event: str, details: tuple[Any, ...]) -> None:
        if event != "open":
            return
        try:
            path, _, flags = details
            path = os.path.abspath(os.fsdecode(path))
            written = not flags & os.O_TRUNC and self._was_written_by_the_first(path)
        except (
            OSError,
            TypeError,
            ValueError,
        ):  # a descriptor, no such file, no working directory, another event of this name
            return
        if written:
            self._found(path)

    def _was_written_by_the_first(self, path: str) -> bool:
        if path.startswith(self._ours) or path.endswith(_CODE) or any(cache in path for cache in _CACHES):
            return False
        status = os.stat(path)
        return stat.S_ISREG(status.st_mode) and self._began <= status.st_mtime_ns < self._ended
