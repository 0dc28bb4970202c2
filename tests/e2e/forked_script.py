"""Runs a script in a forked child, which starts with every heavy library imported already."""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nursery import Child, fork
from patience import PATIENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a script ended: class name and text of what it raised, what it printed, what the probe brought back."""

    raised: str | None
    message: str
    output: str
    seconds: float
    evidence: Any


Around = Callable[[Callable[[], None]], Any]
"""Calls the script that it is given, which never raises, and returns evidence that can be pickled."""


def run_forked(path: Path, folder: Path, around: Around) -> Ended:
    """Run ``path`` in a child whose working directory is ``folder``.

    Raises TimeoutError for one that takes too long, ChildProcessError for one that dies.
    """
    result, output = folder / "ended.pickle", folder / "output.txt"
    wait_for(fork(run_here, path, folder, result, output, around), path)
    text = output.read_text(encoding="utf-8", errors="replace")
    if not result.exists():
        raise ChildProcessError(f"{path.name} left no result:\n{text[-2000:]}")
    raised, message, seconds, evidence = pickle.loads(result.read_bytes())
    return Ended(raised=raised, message=message, output=text, seconds=seconds, evidence=evidence)


def wait_for(child: Child, path: Path, limit: float = PATIENCE) -> None:
    """Wait for ``child``; one that takes longer than ``limit`` seconds is killed and reported as a TimeoutError."""
    deadline = time.monotonic() + limit
    while not child.over():
        if time.monotonic() > deadline:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            raise TimeoutError(f"{path.name} ran longer than {limit:.0f} s")
        time.sleep(0.005)
    child.wait()


def redirect(output: Path) -> None:
    """Send this process's streams to ``output``, a line at a time."""
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def run_here(path: Path, folder: Path, result: Path, output: Path, around: Around) -> None:
    """The child's side: the script as ``__main__``, and its end written to ``result``."""
    import torch

    redirect(output)
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.parent))
    raised: list[BaseException] = []

    def script() -> None:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except BaseException as error:  # noqa: BLE001 - whatever ends a script is what is reported here
            raised.append(error)

    started = time.perf_counter()
    evidence = around(script)
    seconds = time.perf_counter() - started
    name = type(raised[0]).__name__ if raised else None
    result.write_bytes(pickle.dumps((name, str(raised[0]) if raised else "", seconds, evidence)))
