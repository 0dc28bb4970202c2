"""Runs the command line as a user would: in a process of its own, or, where only its answer matters, in this one."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from patience import PATIENCE

from dtypedoctor.cli import main as command_line

DRIVER = "/dev/nvidiactl"
LATE_CLOCK = Path(__file__).with_name("late_clock.py")


@dataclass(frozen=True, kw_only=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What was printed, however its lines were broken: at words, and at the hyphens of ids."""
        return " ".join(re.sub(r"(?<=\w-)\n\s*", "", self.out).split())


def dtypedoctor(
    *arguments: str | Path,
    cwd: Path | None = None,
    timeout: float = PATIENCE,
    late_with: Path | None = None,
    **environment: str,
) -> Finished:
    """Runs ``dtypedoctor ARGUMENTS`` in a process of its own; as soon as ``late_with`` exists, all its time limits are over."""
    program = ["-m", "dtypedoctor"] if late_with is None else [LATE_CLOCK, late_with]
    return _interpreted(*program, *arguments, cwd=cwd, timeout=timeout, **environment)


def _interpreted(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = PATIENCE, **environment: str
) -> Finished:
    """Runs ``python ARGUMENTS`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(code=done.returncode, out=done.stdout, err=done.stderr)


def forked(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Finished:
    """The same by forks of a process that has imported torch and the trainers, which saves seconds: :mod:`forked_python`."""
    return python("-m", "dtypedoctor", *arguments, cwd=cwd, **environment)


def python(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Finished:
    """Runs ``python ARGUMENTS`` that way; where there is a GPU by an interpreter, because a CUDA context does not survive a fork."""
    if os.path.exists(DRIVER):
        return _interpreted(*arguments, cwd=cwd, **environment)
    from forked_python import run

    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    with TemporaryDirectory() as streams:
        code = run(list(map(str, arguments)), cwd or Path.cwd(), variables, Path(streams))
        out, err = (Path(streams, name).read_text(encoding="utf-8") for name in ("out", "err"))
    return Finished(code=code, out=out, err=err)


def in_this_process(*arguments: str | Path, cwd: Path | None = None) -> Finished:
    """The same as a call of ``main``: the server that imports torch and the trainers starts once for all calls in this process.

    Workers are processes of their own all the same. They see the environment variables that the server was started with.
    """
    argv = ["dtypedoctor", *map(str, arguments)]
    with TemporaryDirectory() as folder, chdir(cwd or "."), patch.object(sys, "argv", argv):
        out, err = Path(folder, "out"), Path(folder, "err")
        with _stream_to(out, "stdout", 1), _stream_to(err, "stderr", 2):
            try:
                command_line.main()
            except SystemExit as ended:
                code = int(str(ended.code))
        return Finished(code=code, out=out.read_text(encoding="utf-8"), err=err.read_text(encoding="utf-8"))


@contextmanager
def _stream_to(path: Path, name: str, descriptor: int) -> Iterator[None]:
    """Inside, what Python and C code write to a standard stream goes to ``path``."""
    getattr(sys, name).flush()
    kept = os.dup(descriptor)
    with path.open("w", encoding="utf-8") as file, patch.object(sys, name, file):
        os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def report_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "report.json").read_text())
