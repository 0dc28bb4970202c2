"""Runs a user's script in a fresh interpreter and collects what it left.

The script's process differs from that of ``python script.py`` as little as can be: the same interpreter, environment,
working directory and standard input. It has a process group of its own, so that it can be stopped with all that it started.
"""

import contextlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.ending import end
from dtypedoctor.runner.guardian import Guardian
from dtypedoctor.runner.launch import Run, WorkerExit, collect, write_request
from dtypedoctor.runner.signals import PassedOn
from dtypedoctor.runner.streams import Streams
from dtypedoctor.runner.terminal import Foreground
from dtypedoctor.scenario.model import Script
from dtypedoctor.scenario.request import Request
from dtypedoctor.trace.ranks import child_directories

BOOT = Path(__file__).resolve().parents[1] / "worker" / "boot.py"
LONGEST_WAIT = 0.5


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


def run_process(
    command: Sequence[str],
    directory: Path,
    *,
    live: bool,
    time_limit: float,
    meanwhile: Callable[[], None] = lambda: None,
    ranks: Sequence[Path] = (),
    stdin_is_read: bool = False,
) -> WorkerExit:
    """Runs a command in a process group of its own until it ends or its time limit is over.

    Signals that this process is sent go to the command. If this process is killed, the command is.

    Args:
        command: the program and its arguments.
        directory: where what it writes is kept.
        live: see :func:`run_script`.
        time_limit: seconds.
        meanwhile: called now and then while it runs.
        stdin_is_read: standard input has been read to its end, and is not begun again.
        ranks: directories of the processes that it starts itself, whose output is shown and kept as well.
    """
    began = time.monotonic()
    with Streams(directory, live=live, ranks=ranks) as streams, PassedOn(streams.resize) as signals:
        with streams.ends() as (out, err), _standard_input(live, again=not stdin_is_read) as given:
            process = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, process_group=0)
        with Guardian(process), Foreground(process) if live else nullcontext() as foreground:
            signals.to(process)
            timed_out = not _wait(
                process, streams, began + time_limit, lambda: signals.stop_together(foreground), meanwhile
            )
        streams.show_rest()
    return WorkerExit(
        code=process.wait(),
        timed_out=timed_out,
        seconds=time.monotonic() - began,
        asked_to_end=signals.asked_to_end,
    )


@contextlib.contextmanager
def _standard_input(live: bool, *, again: bool) -> Iterator[int | None]:
    if live:
        yield None  # the same as this process's
    elif again and stat.S_ISREG(os.fstat(0).st_mode):
        with open("/proc/self/fd/0", "rb") as anew:  # so it begins at the beginning
            yield anew.fileno()
    else:
        yield subprocess.DEVNULL


def _wait(
    process: "subprocess.Popen[bytes]", streams: Streams, deadline: float, *meanwhile: Callable[[], None]
) -> bool:
    """Waits for the process, showing what it writes; False if it had to be stopped at its time limit."""
    ended = os.pidfd_open(process.pid)
    try:
        while process.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                end(process.pid)
                process.wait()
                return False
            streams.show(min(left, LONGEST_WAIT), ended)
            for act in meanwhile:
                act()
    finally:
        os.close(ended)
    return True
