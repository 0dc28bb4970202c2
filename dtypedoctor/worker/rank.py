"""A process that torchrun has started for the doctor: one rank of a scenario or of a user's script."""

import ctypes
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from dtypedoctor.redaction.redact import read_request
from dtypedoctor.trace.ranks import STREAMS, member, rank_directory
from dtypedoctor.unpatched import from_json
from dtypedoctor.worker import script

PR_SET_PDEATHSIG = 1


def enter(directory: Path) -> Path:
    """This rank's own directory in that of the run. From now on the process dies with torchrun, however that is ended.

    Raises:
        RuntimeError: the process was not started by torchrun.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    here = member()
    if here is None:
        raise RuntimeError("RANK and WORLD_SIZE are not set: this process was not started by torchrun")
    place = rank_directory(directory, here.rank)
    _write_to(place / STREAMS)
    return place


def _write_to(streams: Path) -> None:
    """Lets this process's output and error go where the doctor wants them; to torchrun's own where that is not possible."""
    try:
        paths = from_json(streams.read_bytes())
        for descriptor, path in enumerate(paths, start=1):
            end = os.open(path, os.O_WRONLY | os.O_NOCTTY)  # torchrun has made this process the first of a session
            os.dup2(end, descriptor)
            os.close(end)
    except OSError:
        return


def serve(directory: Path) -> None:
    """Does what ``DIRECTORY/request.json`` asks for: a user's script in this interpreter, or a scenario."""
    steps = from_json(read_request(directory))["scenario"]["steps"]
    if steps[0]["workload"]["kind"] == "script":
        script.serve(directory)
        return
    status = import_module("dtypedoctor.worker.main").serve(directory)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the trace is complete: libraries' exit handlers can only hang or fail here
