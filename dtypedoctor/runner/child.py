"""What happens first in a worker process, before anything heavy. Imported by doctor and worker, so it imports no torch."""

import os
import sys
import threading
from importlib import import_module
from multiprocessing import parent_process
from pathlib import Path

WORKER = "dtypedoctor.worker.main"
"""The module on the other side of the border; it is imported by name, and only in worker processes."""

PRELOAD = "dtypedoctor.worker.preload"
"""What the warm server imports before it forks workers."""

STDOUT, STDERR = "stdout.txt", "stderr.txt"
"""Where a worker's streams go, in its directory."""


def begin(directory: str) -> None:
    """Cuts the process loose from the doctor's streams and session, then serves the request in ``directory``."""
    os.setsid()  # so that the doctor can stop the worker together with everything that it starts
    place = Path(directory)
    _redirect(place / STDOUT, 1)
    _redirect(place / STDERR, 2)
    _leave_with_the_doctor()
    status = import_module(WORKER).serve(place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the trace is complete: libraries' exit handlers can only hang or fail here


def _redirect(path: Path, descriptor: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(handle, descriptor)
    os.close(handle)


def _leave_with_the_doctor() -> None:
    """A worker whose doctor was killed must not go on for hours."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="dtypedoctor-parent").start()
