"""Run directories: their names, and how they come to be."""

import os
import re
import time
from itertools import count
from pathlib import Path

from dtypedoctor.errors import UsageError

__all__ = ["job_directory", "make_directory", "new_directory", "scenario_name"]

_START = 19
"""Place of the time of start in ``/proc/PID/stat``, counted from behind the name."""


def new_directory(out: Path | None, name: str) -> Path:
    """Creates ``out`` or, where that is None, ``runs/NAME-TIME`` with a number behind it while that is taken.

    Two that are started in the same second get two directories: creating one is also what says that it was free.

    Raises:
        UsageError: ``out`` exists, or none can be created.
    """
    if out is not None:
        make_directory(out)
        return out
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (Path("runs") / (stem + (f"-{i}" if i else "")) for i in count())
    return next(path for path in candidates if _made(path))


def make_directory(directory: Path) -> None:
    """Creates a directory that does not exist yet.

    Raises:
        UsageError: it exists, or cannot be created.
    """
    if not _made(directory):
        raise UsageError(f"{directory}: already exists", "A run is never overwritten; give another --out.")


def _made(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(f"{directory}: cannot be created ({error.strerror})", "Give a writable --out.") from error
    return True


def job_directory(name: str) -> Path:
    """``runs/NAME-TIME`` with the time at which the parent process was started: the same for all that it has started."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(_started(os.getppid())))}"


def _started(process: int) -> float:
    """Seconds since the epoch at which a process was started."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[_START])
    lines = Path("/proc/stat").read_text().splitlines()
    booted = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    return booted + ticks / os.sysconf("SC_CLK_TCK")


def scenario_name(program: str) -> str:
    """A scenario's name made from that of a script or module."""
    words = re.sub(r"[^a-z0-9_.-]+", "-", Path(program).name.removesuffix(".py").lower())
    return words.strip("-_.")[:100] or "script"
