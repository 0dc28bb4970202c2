"""Makes a later run of a script the same program as the first: it draws the same random numbers (:func:`repeat`), and it is not run where it
reads or continues a file that the first has written (:class:`FirstRunFiles`).
"""

import functools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dtypedoctor.redaction.redact import REQUEST
from dtypedoctor.trace.ranks import REFUSED, REPEATS, member
from dtypedoctor.unpatched import from_json, time_ns, to_json
from dtypedoctor.worker.on_import import after_import


def repeat(job: str, *, is_first: bool) -> None:
    """Begins with the random states of the first run, or keeps them for a later one; this is called before the program begins.

    Python's and numpy's generators begin with entropy of the system; so does torch's on a CPU, which is left as it is: a program that does not seed
    it draws other numbers in each run. Those of further processes are left alone, because nothing tells which of them is which.

    Args:
        job: folder of the run.
        is_first: whether this is the first process of a run of one.
    """
    directory = Path(job)
    here = member()
    if here is not None or is_first:
        states = RandomStates(directory / f"random_states-{here.rank if here is not None else 'first'}.json")
        after_import("random", states.python_is_there)
        after_import("numpy.random", states.numpy_is_there)
    if (directory / REPEATS).exists():
        first = Path((directory / REPEATS).read_text(encoding="utf-8"))
        sys.addaudithook(FirstRunFiles(first, directory, functools.partial(_leave, directory)).heard)


def _leave(directory: Path, path: str) -> None:
    """Ends this process before it opens a file of the first run: what came after would not be what the first run did."""
    why = f"the script reads or continues {path}, written during its first run: a second run would be another one"
    (directory / REFUSED).write_text(why, encoding="utf-8")
    os._exit(2)


class RandomStates:
    """The states of Python's and numpy's generators at the beginning of a process.

    Args:
        kept: file with those to begin with; where it is not there, it is written.
    """

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._states: dict[str, Any] = from_json(kept.read_bytes()) if kept.exists() else {}

    def python_is_there(self) -> None:
        """The program has imported ``random``."""
        generator: Any = sys.modules["random"]
        if "python" in self._states:
            version, internal, gauss = self._states["python"]
            generator.setstate((version, tuple(internal), gauss))
        else:
            self._keep("python", generator.getstate())

    def numpy_is_there(self) -> None:
        """It has imported ``numpy.random``."""
        generator: Any = sys.modules["numpy.random"]
        if "numpy" in self._states:
            generator.set_state(tuple(self._states["numpy"]))
        else:
            name, keys, *rest = generator.get_state()
            self._keep("numpy", (name, keys.tolist(), *rest))

    def _keep(self, name: str, state: Any) -> None:
        self._states[name] = state
        try:
            self._kept.write_text(to_json(self._states), encoding="ascii")
        except OSError:  # a full disk: the script goes on, and a second look at it may draw other numbers
            return


_CLOCK_STEP = 50_000_000
"""Nanoseconds by which a file's time may lie before the moment of writing; file systems use the coarse clock of the kernel."""
_CODE = (".py", ".pyc", ".so")
"""Suffixes of what is imported: somebody who edits their code while it runs changes nothing that the first run has written."""
_CACHES = ("/.cache/", "/.triton/", "/torchinductor_", "/__pycache__/")
"""Directories of what is computed again where it is missing: whether it is there changes nothing but time."""
_CACHE_TAG = "CACHEDIR.TAG"
"""File by which tools mark a directory as such a cache (https://bford.info/cachedir), as pytest, mypy and pip do."""


class FirstRunFiles:
    """Keeps a later run of a script away from what the first one has written.

    A training that saves checkpoints and resumes from them, or appends to its log, is another program when it runs a second time: it
    begins where the first run ended, and what it writes is not what the user's run wrote. Python's audit events tell of a file
    before it is opened.

    Calls ``found`` with the path of a file from the first run that is about to be read or continued; that it is replaced is all right.

    Args:
        first: directory of the first run.
        own: directory of the run that is beginning.
        found: what to do; must not return if the file is not to be opened.
    """

    def __init__(self, first: Path, own: Path, found: Callable[[str], None]) -> None:
        self._found = found
        self._began = (first / REQUEST).stat().st_mtime_ns
        self._ended = time_ns() - _CLOCK_STEP
        places = (str(first.resolve()), str(own.resolve()), sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev")
        self._ours = tuple(f"{place}/" for place in places)

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
        if not stat.S_ISREG(status.st_mode) or not self._began <= status.st_mtime_ns < self._ended:
            return False
        return not any(os.path.exists(os.path.join(folder, _CACHE_TAG)) for folder in _folders_around(path))


def _folders_around(path: str) -> Iterator[str]:
    while (folder := os.path.dirname(path)) != path:
        yield folder
        path = folder
