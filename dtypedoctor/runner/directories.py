"""Names of run directories."""

import os
import re
import time
from pathlib import Path

__all__ = ["default_directory", "job_directory", "scenario_name"]

_START = 19
"""Place of the time of start in ``/proc/PID/stat``, counted from behind the name."""


def default_directory(name: str) -> Path:
    """``runs/NAME-TIME``, with a number behind it where that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (Path("runs") / (stem + (f"-{i}" if i else "")) for i in range(1000))
    return next(path for path in candidates if not path.exists())


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
