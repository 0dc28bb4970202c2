"""Runs Python programs in fresh interpreters: a user's script, or the processes that torchrun starts.

A user's script differs from ``python script.py`` as little as can be: the same interpreter, environment, working directory
and standard input. It has a process group of its own, so that it can be stopped with all that it started.
"""

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtypedoctor.redaction.redact import write_request_file
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.process import run_process
from dtypedoctor.runner.run import Run, WorkerExit, collect, led_by, write_request
from dtypedoctor.scenario.model import Request, Script
from dtypedoctor.trace.ranks import child_directories, rank_directory

BOOT = Path(__file__).resolve().parents[1] / "worker" / "boot.py"


def run_script(request: Request, directory: Path, *, live: bool) -> Run:
    """Runs the script of ``request``; everything it leaves lies in ``directory``, which must not exist yet.

    Args:
        live: give the script this process's standard input, and show what it writes. Otherwise what it writes is only
            kept, and it reads standard input again from the beginning if that is a file; else it reads nothing.

    Raises:
        UsageError: the directory cannot be written, or there is no such script.
    """
    make_directory(directory)
    write_request(directory, request)
    command = [sys.executable, str(BOOT), str(directory.resolve())]
    workload = request.scenario.steps[0].workload
    read_up = isinstance(workload, Script) and workload.path == "-"  # the program itself has come from there
    ended = run_process(command, directory, live=live, time_limit=request.scenario.time_limit, stdin_is_read=read_up)
    own = collect(directory, ended, foreign=True)
    spawned = child_directories(directory)
    return replace(own, children={number: collect(place, ended, foreign=True) for number, place in spawned.items()})


ELASTIC = BOOT.with_name("elastic.py")
FAILURES = "failures.json"
LOGS = "torchrun"
"""Folder of torchrun's own logs."""


def run_ranks(
    request: Request, directory: Path, *, live: bool, progress: Callable[[Path], None] = lambda _: None
) -> Run:
    """Runs ``request`` in as many processes as its scenario says, on this machine.

    Args:
        request: what each of them is to do.
        directory: holds afterwards a directory for each rank, and what torchrun itself printed; must not exist yet.
        live: show what the processes write, as it comes.
        progress: called now and then, while they run, with the directory of rank 0.

    Returns:
        The run of the rank that failed first, or of rank 0; its ``ranks`` are those of all.

    Raises:
        UsageError: the directory cannot be written, or the scenario cannot be run at all.
    """
    assert request.scenario.distributed is not None  # whoever asks for ranks says how many
    count = request.scenario.distributed.processes
    make_directory(directory)
    for rank in range(count):
        place = rank_directory(directory, rank)
        place.mkdir()
        write_request_file(place, _for_rank(request, rank).model_dump_json())
    command = [sys.executable, "-P", *_torchrun(directory.resolve(), count)]
    places = [rank_directory(directory, rank) for rank in range(count)]
    ended = run_process(
        command,
        directory,
        live=live,
        time_limit=request.scenario.time_limit,
        meanwhile=lambda: progress(places[0]),
        ranks=places,
    )
    failures = _failures(directory)
    foreign = isinstance(request.scenario.steps[0].workload, Script)
    runs = [_collect(directory, rank, ended, failures, foreign=foreign) for rank in range(count)]
    leading = min(failures, key=lambda rank: float(failures[rank]["time"]), default=0)
    return led_by(tuple(runs), leading)


def _torchrun(directory: Path, count: int) -> list[str]:
    return [
        str(ELASTIC),
        str(directory / FAILURES),
        "--standalone",
        f"--nproc-per-node={count}",
        f"--log-dir={directory / LOGS}",
        str(BOOT),
        "--rank",
        str(directory),
    ]


def _for_rank(request: Request, rank: int) -> Request:
    """The request as one rank gets it: what it repeats is what the same rank did before."""
    if request.repeats is None:
        return request
    return request.model_copy(update={"repeats": str(rank_directory(Path("..") / request.repeats, rank))})


def _failures(directory: Path) -> dict[int, dict[str, Any]]:
    try:
        found = json.loads((directory / FAILURES).read_text(encoding="utf-8"))
    except OSError:  # none has failed, or torchrun itself was ended
        return {}
    return {int(rank): failure for rank, failure in found.items()}


def _collect(
    directory: Path, rank: int, ended: WorkerExit, failures: dict[int, dict[str, Any]], *, foreign: bool
) -> Run:
    """One rank's run.

    When a rank fails, torchrun stops the others. Those whose traces had an end by then are taken at the word of these.
    """
    place = rank_directory(directory, rank)
    code = int(failures[rank]["code"]) if rank in failures else -signal.SIGTERM if failures else ended.code
    run = collect(place, ended if ended.timed_out else replace(ended, code=code), foreign=foreign)
    end = run.trace.end
    if end is not None and run.exit.code == -signal.SIGTERM:
        run = collect(place, replace(run.exit, code=int(end.outcome != "completed")), foreign=foreign)
    return replace(run, rank=rank)
