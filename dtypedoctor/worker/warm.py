"""A server that builds a scenario's models once, for many runs.

On a CPU it forks a worker for each request that comes. It must not start threads: a forked child has only the thread that forked it, and a lock
held by another stays locked. So models are built on one thread (OpenMP's pool does not survive a fork either), and each child takes the usual
number.

The same goes for the ranks of a sharded model on any device, as long as its weights are in the host's memory.

A CUDA context does not survive a fork. With other models on a GPU the server is the worker: it makes one run after the other, each with the model as it was built
(:mod:`dtypedoctor.worker.stock`), and ends when it cannot promise that any more. Whoever asked then starts another one.
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
from dtypedoctor.scenario.model import Request, Scenario
from dtypedoctor.worker.main import choose_device, leave, prepare_process, serve
from dtypedoctor.worker.stock import ResidentStock, Stock

PR_SET_PDEATHSIG = 1

Redirect = Callable[[Path], None]
"""Has this process write its standard streams into files of a directory: the runner says which."""


IN_PLACE = "DTYPEDOCTOR_RESIDENT_IN_PLACE"
"""Variable that has the server make its runs itself on a CPU, too, so that this can be tested without a GPU."""


def serve_warm(
    directory: Path,
    channel: Connection,
    redirect: Redirect,
    leave_with_the_doctor: Callable[[], None],
    *,
    in_place: bool,
) -> None:
    """Builds what ``DIRECTORY/request.json`` needs, then makes a run for each directory that comes through ``channel``.

    Sends ``("ready", built, device, room)`` once: ``room`` are the bytes of the device that are free beside the models, 0 where runs are not made in place; ``built`` is False where building raised (each worker will then find out for itself), or where
    the device cannot be shared by forked processes and runs may not be made ``in_place``.
    Takes ``("run", directory)``, and ``("stop", directory)`` for SIGKILL; sends ``("ended", directory, status)``, where a negative status is a
    signal's number. Ends when the channel is closed, and ends its workers then. Each run begins with ``redirect``. A server that makes
    its runs itself sends ``("retired", why, 0)`` and ends when the models are no longer what they were.
    """
    scenario = Request.model_validate_json(read_request(directory)).scenario
    device = choose_device(scenario.device).type
    if (in_place and device != "cpu") or os.environ.get(IN_PLACE) == "1":
        leave_with_the_doctor()  # by a thread, so not where workers are forked
        _serve_in_place(scenario, directory, channel, redirect)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stock = Stock()
    prepare_process(scenario)
    built = device == "cpu" and _filled(stock.fill, scenario, torch.device(device))
    channel.send(("ready", built, device, 0))
    _Workers(channel, stock, threads, redirect).answer()


def _filled(fill: Callable[[Scenario, torch.device], None], scenario: Scenario, device: torch.device) -> bool:
    """Whether the models of ``scenario`` could be built; if not, the first worker meets the reason again and reports it."""
    with contained() as refused:
        fill(scenario, device)
    if (error := refused.error) is not None:
        print(f"not built in advance: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return error is None


def _serve_in_place(scenario: Scenario, home: Path, channel: Connection, redirect: Redirect) -> None:
    """Makes each run in this process, which the doctor ends when one takes too long."""
    device = choose_device(scenario.device)
    prepare_process(scenario)
    stock = ResidentStock()
    built = _filled(stock.fill, scenario, device)
    if built and not stock.may_stay():
        built = False
        print("the models are loaded for each run: they take too much memory to stay", file=sys.stderr, flush=True)
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    channel.send(("ready", built, device.type, room))
    while built:
        try:
            verb, directory = channel.recv()
        except (EOFError, ConnectionError):
            return
        if verb != "run":
            continue  # what was to be stopped has ended
        redirect(Path(directory))
        status = serve(Path(directory), stock)
        sys.stdout.flush()
        sys.stderr.flush()
        redirect(home)
        channel.send(("ended", directory, status))
        with contained() as failed:  # a device that no longer answers, for example
            stock.put_back()
        if failed.error is not None:
            channel.send(("retired", f"{type(failed.error).__name__}: {failed.error}", 0))
            return


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
            return
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
                leave(status)
        finally:  # a child that returned would go on as a second server
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _kill_group(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to setsid yet
        os.kill(process, signal.SIGKILL)
