"""The ranks of a sharded model as forks of a server that has built it in the host's memory, which they share.

What torchrun does for its processes is done here for forks, as far as one machine needs it: each knows its rank, and when one fails the others
are ended.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.launch import StartedWorker, WarmServer
from dtypedoctor.runner.process import collect_rank, request_of_rank
from dtypedoctor.runner.run import Run, WorkerExit, led_by, write_request
from dtypedoctor.scenario.model import Request, Scenario
from dtypedoctor.trace.ranks import RENDEZVOUS, rank_directory

_GRACE_SECONDS = 30.0
"""How long a rank may take to end after another one has failed, as with torchrun."""
_POLL_SECONDS = 0.02
_FAILED = 1


def may_be_forked(scenario: Scenario) -> bool:
    """Whether the ranks of ``scenario`` need nothing on a device before they are forked: FSDP2 takes the weights from the host a unit at a time.

    bitsandbytes packs weights on the device.
    """
    spec = scenario.distributed
    models = [step.model for step in scenario.steps if step.model is not None]
    if spec is None or spec.strategy != "fsdp" or not models:  # a script shards its own model
        return False
    return all(model.quantization is None for model in models)


def forks_ranks(server: WarmServer, request: Request) -> bool:
    """Whether ``server`` can fork the ranks of ``request``; conditions have to be there before a model is built."""
    return server.is_warm and may_be_forked(request.scenario) and not request.scenario.conditions


class ForkedRanks(StartedWorker):
    """Ranks that may still be running.

    Args:
        request: what each of them is to do.
        directory: for a directory of each rank; must not exist yet.
        server: forks them.

    Raises:
        UsageError: the directory cannot be written.
    """

    def __init__(self, request: Request, directory: Path, server: WarmServer) -> None:
        assert request.scenario.distributed is not None  # a scenario of one process has no ranks
        count = request.scenario.distributed.processes
        self._server = server
        self._places = [rank_directory(directory, rank) for rank in range(count)]
        make_directory(directory)
        for rank, place in enumerate(self._places):
            make_directory(place)
            write_request(place, request_of_rank(request, rank))
        super().__init__(self._places[0], request.scenario.time_limit, self._ended, self._end_all)
        self._statuses: dict[int, int] = {}
        """Of the ranks that have ended, in the order in which they did."""
        self._asked: frozenset[int] = frozenset()
        """Those that were asked to end because another one had failed."""
        self._others_end_by: float | None = None
        self._meeting = Path(tempfile.mkdtemp(prefix="dtypedoctor-ranks-"))
        for rank, place in enumerate(self._places):
            server.fork(place, _variables(rank, count, self._meeting))

    def collect(self) -> Run:
        """The run of the rank that failed first, or of rank 0; its ``ranks`` are those of all.

        Raises:
            UsageError: the scenario cannot be run at all.
        """
        ended = self.ended()
        runs = {rank: self._collected(rank, ended) for rank in self._statuses}
        first = next((rank for rank, run in runs.items() if run.exit.code or run.trace.end is None), 0)
        ranks = tuple(runs[rank] for rank in sorted(runs))
        return led_by(ranks, 0 if ended.timed_out else first)

    def _collected(self, rank: int, ended: WorkerExit) -> Run:
        if not ended.timed_out:
            status = self._statuses[rank]
            asked = signal.SIGTERM if rank in self._asked and status == -signal.SIGTERM else 0
            ended = replace(ended, code=status, ended_by_launcher=asked)
        return collect_rank(self._places[rank], rank, ended)

    def _ended(self, seconds: float) -> int | None:
        """0 if all ranks have ended well, 1 if not; None while one runs."""
        deadline = time.monotonic() + seconds
        while self._running():
            self._note(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            self._end_others()
            if time.monotonic() >= deadline:
                break
        if self._running():
            return None
        shutil.rmtree(self._meeting, ignore_errors=True)
        return _FAILED if any(self._statuses.values()) else 0

    def _running(self) -> Sequence[int]:
        return [rank for rank, _ in enumerate(self._places) if rank not in self._statuses]

    def _note(self, seconds: float) -> None:
        ended = self._server.statuses_of(self._places, seconds)
        self._statuses = {self._places.index(place): status for place, status in ended.items()}

    def _end_others(self) -> None:
        """Once a rank has failed the others wait for it in vain."""
        if not any(self._statuses.values()):
            return
        now = time.monotonic()
        if self._others_end_by is None:
            self._others_end_by = now + _GRACE_SECONDS
            self._asked = frozenset(self._running())
            for rank in self._asked:
                self._server.ask_to_end(self._places[rank])
        elif now > self._others_end_by:
            self._end_all()

    def _end_all(self) -> None:
        for rank in self._running():
            self._server.kill(self._places[rank])


def _variables(rank: int, count: int, meeting: Path) -> dict[str, str]:
    """What torchrun tells a process by variables, but that they meet in a file: nobody else can take that as they can a port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        RENDEZVOUS: str(meeting / "store"),
    }
