"""Names of run directories."""

import re
import time
from pathlib import Path

__all__ = ["default_directory", "scenario_name"]


def default_directory(name: str) -> Path:
    """``runs/NAME-TIME``, with a number behind it where that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (Path("runs") / (stem + (f"-{i}" if i else "")) for i in range(1000))
    return next(path for path in candidates if not path.exists())


def scenario_name(program: str) -> str:
    """A scenario's name made from that of a script or module."""
    words = re.sub(r"[^a-z0-9_.-]+", "-", Path(program).name.removesuffix(".py").lower())
    return words.strip("-_.")[:100] or "script"
