"""Runs a Python script in a fresh interpreter, as somebody else would."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_clean"]


def run_clean(script: Path, time_limit: float) -> tuple[int, str, str]:
    """Runs ``script`` in its own directory; modules of the present directory can be imported, nothing else is passed on.

    Returns:
        The exit status (minus the signal that ended it, -1 at the time limit), its output, and what it wrote of errors.
    """
    paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    try:
        done = subprocess.run(
            [sys.executable, script.name],
            cwd=script.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "", f"it was stopped after {time_limit:.0f} s"
    return done.returncode, done.stdout, done.stderr
