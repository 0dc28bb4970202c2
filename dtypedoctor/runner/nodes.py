"""A job on several machines that all name one folder: each records in a directory of its own there, ``node-0``, ``node-1``, …

No machine writes into the directory of another. Each machine that ends writes the joint report beside these directories, one at a
time, so the report of the last one stays.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import open_file, parse_json, read_file, write_file
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.trace.ranks import NODE, node_directories

JOB = "nodes.json"
"""What the job is, in its folder."""
PROCESS = "node.json"
"""Which process records a node, in the node's directory."""
SECONDS = 15.0
"""How long a machine waits for the reports of the others: healthy ranks end within a second of each other."""


def enter(folder: Path, job: dict[str, Any], number: int | None) -> Path:
    """Makes this machine's directory in the folder of a job.

    Args:
        folder: of the job; made by the first machine that comes.
        job: what has to be the same on all machines; ``nodes`` is how many there may be.
        number: of this machine; None for the first that is free.

    Raises:
        UsageError: the folder holds something else, or this machine's directory, or the job has ended, or a folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if all(path.name.startswith(f".{JOB}.") for path in folder.iterdir()):  # what others are about to name so
            _write_once(folder / JOB, job)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be created ({error.strerror})", "Give a writable --out.") from error
    other = "A run is never overwritten; give another --out, the same one on each machine of the job."
    if _json(folder / JOB) != job:
        raise UsageError(f"{folder}: already exists, and is not of this job", other)
    nodes = node_directories(folder)
    ended = [place.name for place in nodes if is_over(place)]
    if ended:
        raise UsageError(f"{folder}: this job has ended already ({', '.join(ended)})", other)
    if number is None and len(nodes) >= job["nodes"]:
        raise UsageError(f"{folder}: all {job['nodes']} machines of this job record here already", other)
    place = _made(folder, number)
    _write_once(place / PROCESS, {"boot": _boot(), "pid": os.getpid()})
    return place


def _made(folder: Path, number: int | None) -> Path:
    if number is not None:
        place = folder / f"{NODE}{number}"
        make_directory(place)
        return place
    for free in count():
        with contextlib.suppress(FileExistsError):
            place = folder / f"{NODE}{free}"
            place.mkdir()
            return place
    raise AssertionError  # count() has no end


def leave(folder: Path) -> None:
    """Takes the folder of a job away again where no machine records in it."""
    with contextlib.suppress(OSError):
        if not node_directories(folder):
            (folder / JOB).unlink()
            folder.rmdir()


def is_over(node: Path) -> bool:
    """Whether a machine has written its report."""
    return (node / "report.json").exists()


def wait_for_others(folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when every machine that records in the folder has written its report, or was killed here, or after :data:`SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and not all(is_over(node) or _is_dead(node) for node in node_directories(folder)):
        sleep(0.1)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other machine is inside; where the file system has no locks, all may be."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open_file(folder / JOB))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_dead(node: Path) -> bool:
    """Whether the process that recorded a node was one of this machine and is gone."""
    told = _json(node / PROCESS)
    return told.get("boot") == _boot() and not Path("/proc", str(told.get("pid"))).exists()


def _boot() -> str:
    """Identifies this machine until it starts again, and nobody."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _write_once(path: Path, content: dict[str, Any]) -> None:
    """Writes a file as a whole, unless it is there already."""
    with contextlib.suppress(FileExistsError):
        write_file(path, json.dumps(content), replace=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
