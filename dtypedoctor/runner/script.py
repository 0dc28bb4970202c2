"""Runs a user's script in a fresh interpreter and collects what it left.

The script's process differs from that of ``python script.py`` as little as can be: the same interpreter, environment,
working directory and standard input. It has a process group of its own, so that it can be stopped with all that it started.
"""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.launch import Run, WorkerExit, collect, write_request
from dtypedoctor.runner.streams import Streams
from dtypedoctor.runner.terminal import Foreground
from dtypedoctor.scenario.request import Request

BOOT = Path(__file__).resolve().parents[1] / "worker" / "boot.py"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
    ended = run_process(command, directory, live=live, time_limit=request.scenario.time_limit)
    return collect(directory, ended, foreign=True)


def run_process(
    command: Sequence[str],
    directory: Path,
    *,
    live: bool,
    time_limit: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> WorkerExit:
    """Runs a command in a process group of its own until it ends or its time limit is over.

    Args:
        command: the program and its arguments.
        directory: where what it writes is kept.
        live: see :func:`run_script`.
        time_limit: seconds.
        meanwhile: called now and then while it runs.
    """
    began = time.monotonic()
    with Streams(directory, live=live) as streams:
        with streams.ends() as (out, err), _standard_input(live) as given:
            process = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, process_group=0)
        with _forwarding(process), Foreground(process) if live else nullcontext() as foreground:
            timed_out = not _wait(process, streams, began + time_limit, foreground, meanwhile)
        streams.show_rest()
    return WorkerExit(code=process.wait(), timed_out=timed_out, seconds=time.monotonic() - began)


@contextlib.contextmanager
def _standard_input(live: bool) -> Iterator[int | None]:
    if live:
        yield None  # the same as this process's
    elif stat.S_ISREG(os.fstat(0).st_mode):
        with open("/proc/self/fd/0", "rb") as again:  # opened anew, so it begins at the beginning
            yield again.fileno()
    else:
        yield subprocess.DEVNULL


def _wait(process: "subprocess.Popen[bytes]", streams: Streams, deadline: float, foreground: Foreground | None,
          meanwhile: Callable[[], None]) -> bool:  # fmt: skip
    """Waits for the process, showing what it writes; False if it had to be stopped at its time limit."""
    ended = os.pidfd_open(process.pid)
    try:
        while process.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return False
            streams.show(min(left, LONGEST_WAIT), ended)
            if foreground is not None:
                foreground.stop_with_it()
            meanwhile()
    finally:
        os.close(ended)
    return True


@contextlib.contextmanager
def _forwarding(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Signals that mean the script are sent on to it: Ctrl-C to its whole group, as a terminal does."""

    def forward(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
