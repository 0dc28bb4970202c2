"""Workers forked from a server that has the scenario's models built already."""

import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from dtypedoctor.interruptions import noticing
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.launch import Launcher, Run, StartedWorker, WorkerExit, collect, write_request
from dtypedoctor.scenario.request import Request

NO_ANSWER = 1
"""Exit status of a worker whose server has died with it."""


class WarmServer:
    """Starts workers in milliseconds. Use as a context manager.

    Where the models cannot be built in advance (on a GPU, whose state does not survive a fork, or because building raises),
    workers are started by the launcher and build for themselves.

    Args:
        launcher: started already.
        request: its scenario names the models to build.
        directory: for what the server prints; must not exist yet.
    """

    def __init__(self, launcher: Launcher, request: Request, directory: Path) -> None:
        self._launcher = launcher
        self._request = request
        self._directory = directory
        self._process: ForkServerProcess | None = None
        self._ended: dict[str, int] = {}
        self.is_warm = False
        """Whether the models are built."""
        self.device = "cpu"
        """Type of the device that the scenario runs on."""

    def __enter__(self) -> Self:
        self._process, self._channel = self._launcher.start_warm(self._request, self._directory)
        with noticing(lambda _: self.__exit__(None, None, None)):  # Ctrl-C, say: nobody else ends the server then
            try:
                _, self.is_warm, self.device = self._channel.recv()
            except EOFError:  # the server has died while building: a worker will tell of what
                self.is_warm = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._channel.close()
        if self._process is not None:
            self._process.join(1.0)
            self._process.kill()
            self._process.join()

    def start(
        self, request: Request, directory: Path, environment: Mapping[str, str] | None = None
    ) -> "WarmWorker | StartedWorker":
        """Starts a worker and comes back at once; the caller stops and collects it.

        Args:
            request: what it is to do.
            directory: where everything that it leaves will lie; must not exist yet.
            environment: variables for it alone; a worker that is forked from a warm server has that one's.

        Raises:
            UsageError: the directory cannot be written.
        """
        if not self.is_warm:
            return self._launcher.start(request, directory, environment)
        make_directory(directory)
        write_request(directory, request)
        self._send("run", directory)
        return WarmWorker(self, directory, request.scenario.time_limit)

    def stop(self, directory: Path) -> None:
        """Ends the worker of ``directory`` and everything that it started."""
        self._send("stop", directory)

    def status(self, directory: Path, seconds: float) -> int | None:
        """The exit status of the worker of ``directory``, for which it waits at most so long; None while it runs."""
        deadline = time.monotonic() + seconds
        while str(directory) not in self._ended:
            left = deadline - time.monotonic()
            if left < 0 or not wait([self._channel], left):
                break
            try:
                _, where, status = self._channel.recv()
            except (EOFError, ConnectionError):
                return NO_ANSWER
            self._ended[where] = status
        return self._ended.get(str(directory))

    def _send(self, verb: str, directory: Path) -> None:
        try:
            self._channel.send((verb, str(directory)))
        except (BrokenPipeError, ConnectionError):
            self._ended[str(directory)] = NO_ANSWER


class WarmWorker:
    """A worker that may still be running; the same as :class:`~dtypedoctor.runner.launch.StartedWorker`."""

    def __init__(self, server: WarmServer, directory: Path, time_limit: float) -> None:
        self.directory = directory
        self._server = server
        self._began = time.monotonic()
        self._deadline = self._began + time_limit
        self._timed_out = False
        self._status: int | None = None
        self._seconds = 0.0

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; whether it has ended, which it also has when its time limit is over."""
        if self._status is None:
            self._look(min(seconds, self._deadline - time.monotonic()))
        if self._status is None and time.monotonic() > self._deadline:
            self._timed_out = True
            self.stop()
        return self._status is not None

    def stop(self) -> None:
        """Ends it and everything that it started."""
        if self._status is None:
            self._server.stop(self.directory)
            while self._status is None:
                self._look(1.0)

    def collect(self) -> Run:
        """What it has left.

        Raises:
            UsageError: the worker says that the scenario cannot be run at all.
        """
        ended = WorkerExit(code=self._status or 0, timed_out=self._timed_out, seconds=self._seconds)
        return collect(self.directory, ended)

    def _look(self, seconds: float) -> None:
        self._status = self._server.status(self.directory, max(0.0, seconds))
        self._seconds = time.monotonic() - self._began
