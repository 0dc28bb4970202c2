"""Runs the real command line as a user would."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished command."""

    code: int
    out: str
    err: str


def dtypedoctor(*arguments: str | Path, cwd: Path | None = None, timeout: float = 240, **environment: str) -> Finished:
    """Runs ``dtypedoctor ARGUMENTS`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "dtypedoctor", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(code=done.returncode, out=done.stdout, err=done.stderr)


def report_of(directory: Path) -> dict[str, Any]:
    """The report.json of a run directory."""
    return json.loads((directory / "report.json").read_text())
