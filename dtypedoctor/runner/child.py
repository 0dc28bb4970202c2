"""What happens first in a worker process, before anything heavy. Imported by doctor and worker, so it imports no torch."""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

WORKER = "dtypedoctor.worker.main"
"""The module on the other side of the border; it is imported by name, and only in worker processes."""

WARM = "dtypedoctor.worker.warm"
"""The same for a server that builds models and forks workers."""

PRELOAD = "dtypedoctor.worker.preload"
"""What the warm server imports before it forks workers."""

STDOUT, STDERR = "stdout.txt", "stderr.txt"
"""Where a worker's streams go, in its directory."""


def begin(directory: str, environment: Mapping[str, str] | None = None) -> None:
    """Cuts the process loose from the doctor's streams and session, then serves the request in ``directory``.

    Args:
        directory: holds the request.
        environment: variables to set before anything is imported.
    """
    place = _set_apart(directory)
    os.environ.update(environment or {})
    _leave_with_the_doctor()
    status = import_module(WORKER).serve(place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the trace is complete: libraries' exit handlers can only hang or fail here


def begin_warm(directory: str, channel: Connection) -> None:
    """The same for a server of workers, which ends when the doctor closes ``channel``."""
    place = _set_apart(directory)
    import_module(WARM).serve_warm(place, channel, redirect)
    os._exit(0)


def _set_apart(directory: str) -> Path:
    os.setsid()  # so that the doctor can stop the process together with everything that it starts
    place = Path(directory)
    redirect(place)
    return place


def redirect(directory: Path) -> None:
    """Lets what this process writes to its standard streams go into files of a run's directory."""
    _redirect(directory / STDOUT, 1)
    _redirect(directory / STDERR, 2)


def _redirect(path: Path, descriptor: int) -> None:
    """Lets what is written to ``descriptor`` go to the end of ``path``, which is the user's alone: it is raw."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, descriptor)
    os.close(handle)


def _leave_with_the_doctor() -> None:
    """A worker whose doctor was killed must not go on for hours."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.killpg(os.getpgrp(), signal.SIGKILL)  # and with it what it has started itself

    threading.Thread(target=wait, daemon=True, name="dtypedoctor-parent").start()
