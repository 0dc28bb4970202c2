"""A server that builds a scenario's models once and forks a worker for each request that comes.

It must not start threads: a forked child has only the thread that forked it, and a lock held by another stays locked. So
models are built on one thread (OpenMP's pool does not survive a fork either), and each child takes the usual number.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from dtypedoctor.interruptions import contained, noticing
from dtypedoctor.redaction.redact import read_request
from dtypedoctor.scenario.model import Request
from dtypedoctor.worker.main import Stock, choose_device, prepare_process, serve

PR_SET_PDEATHSIG = 1

Redirect = Callable[[Path], None]
"""Has this process write its standard streams into files of a directory: the runner says which."""


def serve_warm(directory: Path, channel: Connection, redirect: Redirect) -> None:
    """Builds what ``DIRECTORY/request.json`` needs, then forks a worker for each directory that comes through ``channel``.

    Sends ``("ready", built, device)`` once; ``built`` is False where the models are not kept, because a device cannot be shared
    by forked processes or because building raised (each worker will then find out for itself). Takes ``("run", directory)``
    and ``("stop", directory)``; sends ``("ended", directory, status)``, where a negative status is a signal's number. Ends when
    the channel is closed, and ends its workers then. Each worker begins with ``redirect``.
    """
    scenario = Request.model_validate_json(read_request(directory)).scenario
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stock = Stock()
    device = choose_device(scenario.device).type
    built = device == "cpu"
    if built:
        prepare_process(scenario)
        with contained() as refused:  # the first worker meets it again and reports it
            stock.fill(scenario, torch.device("cpu"))
        if (error := refused.error) is not None:
            built = False
            print(f"not built in advance: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    channel.send(("ready", built, device))
    _Workers(channel, stock, threads, redirect).answer()


class _Workers:
    def __init__(self, channel: Connection, stock: Stock, threads: int, redirect: Redirect) -> None:
        self._channel = channel
        self._stock = stock
        self._threads = threads
        self._redirect = redirect
        self._running: dict[int, tuple[int, str]] = {}
        """Process id and directory of each running worker, by the descriptor that tells its end."""

    def answer(self) -> None:
        """Serves until the other side closes the channel."""
        try:
            while True:
                for ready in wait([self._channel, *self._running]):
                    if ready is self._channel:
                        self._obey(*self._channel.recv())
                    elif isinstance(ready, int):
                        self._reap(ready)
        except (EOFError, ConnectionError):
            for process, _ in self._running.values():
                _kill_group(process)

    def _obey(self, verb: str, directory: str) -> None:
        if verb == "run":
            process = os.fork()
            if process == 0:
                self._work(Path(directory))
            self._running[os.pidfd_open(process)] = process, directory
        else:
            for process, where in self._running.values():
                if where == directory:
                    _kill_group(process)

    def _reap(self, descriptor: int) -> None:
        process, directory = self._running.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(process, 0)
        self._channel.send(("ended", directory, os.waitstatus_to_exitcode(status)))

    def _work(self, directory: Path) -> None:
        """The child's side; never returns."""
        status = 1
        try:
            with noticing(traceback.print_exception):
                os.setsid()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                self._redirect(directory)
                self._channel.close()
                torch.set_num_threads(self._threads)
                status = serve(directory, self._stock)
        finally:  # a child that returned would go on as a second server
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _kill_group(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to setsid yet
        os.kill(process, signal.SIGKILL)
