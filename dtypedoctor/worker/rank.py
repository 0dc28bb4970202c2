"""A process that torchrun has started for the doctor: one rank of a scenario or of a user's script."""

import ctypes
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from dtypedoctor.trace.ranks import member, rank_directory
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
    return rank_directory(directory, here.rank)


def serve(directory: Path) -> None:
    """Does what ``DIRECTORY/request.json`` asks for: a user's script in this interpreter, or a scenario."""
    steps = json.loads((directory / script.REQUEST).read_bytes())["scenario"]["steps"]
    if steps[0]["workload"]["kind"] == "script":
        script.serve(directory)
        return
    status = import_module("dtypedoctor.worker.main").serve(directory)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the trace is complete: libraries' exit handlers can only hang or fail here
