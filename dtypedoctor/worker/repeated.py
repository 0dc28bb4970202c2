"""Makes a later run of a script the same program as the first: it draws the same random numbers and reads no file that the first has written.

Python's and numpy's generators begin with entropy of the system. Their first state is kept beside the trace of the first
run and set in the later ones. torch's begins with the same seed in every process anyway.

A training that saves checkpoints and resumes from them, or appends to its log, is another program when it runs a second time: it begins where the
first run ended, and what it writes is not what the user's run wrote. Python's audit events tell of a file before it is opened.
"""

import os
import random
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtypedoctor.unpatched import from_json, time_ns, to_json

__all__ = ["FirstRunFiles", "RandomStates"]

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
        sys.addaudithook(self.heard)

    def heard(self, event: str, details: tuple[Any, ...]) -> None:
        """The audit hook."""
        if event != "open":
            return
        try:
            path, _, flags = details
            path = os.path.abspath(os.fsdecode(path))
            written = not flags & os.O_TRUNC and self._was_written_by_the_first(path)
        except (OSError, TypeError, ValueError):
            return  # a descriptor, no such file, no working directory, another event of this name
        if written:
            self._found(path)

    def _was_written_by_the_first(self, path: str) -> bool:
        if path.startswith(self._ours) or path.endswith(_CODE) or any(cache in path for cache in _CACHES):
            return False
        status = os.stat(path)
        return stat.S_ISREG(status.st_mode) and self._began <= status.st_mtime_ns < self._ended


STATES = "random_states.json"


class RandomStates:
    """The generators' states at the beginning of a run.

    Args:
        directory: where they are kept.
        repeats: directory of the run whose states this one begins with; None for a run that begins with its own.
    """

    def __init__(self, directory: Path, repeats: Path | None) -> None:
        self._kept = directory / STATES
        self._states: dict[str, Any] = {}
        if repeats is not None and (repeats / STATES).exists():
            self._states = from_json((repeats / STATES).read_bytes())

    def begin(self) -> None:
        """The script is about to start."""
        if "python" in self._states:
            version, internal, gauss = self._states["python"]
            random.setstate((version, tuple(internal), gauss))
        else:
            self._keep("python", random.getstate())

    def numpy_is_there(self) -> None:
        """numpy's random module has been imported."""
        numpy_random: Any = sys.modules["numpy.random"]
        if "numpy" in self._states:
            numpy_random.set_state(tuple(self._states["numpy"]))
        else:
            name, keys, *rest = numpy_random.get_state()
            self._keep("numpy", (name, keys.tolist(), *rest))

    def _keep(self, name: str, state: Any) -> None:
        self._states[name] = state
        try:
            self._kept.write_text(to_json(self._states), encoding="ascii")
        except OSError:  # a full disk: the script goes on, and a second look at it may draw other numbers
            return
