"""Runs a Python script in a fresh interpreter, as somebody else would."""

import subprocess
import sys
from pathlib import Path

__all__ = ["run_clean"]

_RUN = """
import runpy, sys
sys.path.append(sys.argv.pop())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_clean(script: Path, time_limit: float) -> tuple[int, str, str]:
    """Runs ``script`` in its own directory; modules of the present directory can be imported where no other has their name.

    Returns:
        The exit status (minus the signal that ended it, -1 at the time limit), its output, and what it wrote of errors.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RUN, script.name, str(Path.cwd())],
            cwd=script.parent,
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
