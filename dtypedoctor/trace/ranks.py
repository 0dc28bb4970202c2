"""Where the processes of a distributed program leave their traces: ``rank-0``, ``rank-1``, … in the directory of the run."""

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dtypedoctor.foreign_files import is_real_directory
from dtypedoctor.trace.events import Header

SWITCH, JOB = "DTYPEDOCTOR", "DTYPEDOCTOR_JOB"
"""Environment variables: record whatever runs; and the folder in which the processes of a run are recorded."""
BEGUN = "begun"
"""In that folder: the first Python process of a command has looked at the variable, whether or not it imports torch."""
FAILURES = "failures.json"
"""There: which ranks a launcher has seen fail."""
REPEATS, STATES, REFUSED = "repeats.txt", "random_states.json", "refused.txt"
"""There: which run this one repeats; the random states to begin with; why it was not made."""
BEFORE, JOB_FILE = "before", "job.json"
"""In a run directory: the untreated run, which stands for all; and what a job that began by itself was started with."""

LEADING = "leading"
"""Link to the directory of the rank that the run's report is about."""

NODE = "node-"
"""How the directory of a machine begins, in the folder that several machines of a job name."""

LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "torch.distributed.run", "accelerate.commands.launch", "accelerate.commands.accelerate_cli",
     "deepspeed.launcher.runner", "deepspeed.launcher.launch"}
)  # fmt: skip
"""Programs and modules that start the ranks of a job, on one machine or several."""

_NAME = "rank-"
_CHILD = "spawned-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of several, as its launcher tells it by environment variables.

    Attributes:
        rank: its number among all processes, from 0.
        world_size: how many there are.
        local_rank: its number among those of this machine.
    """

    rank: int
    world_size: int
    local_rank: int


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_OTHERS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # srun; a batch script has no step
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI's mpirun
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # mpiexec of MPICH and of Intel MPI
)
"""Variables of launchers that set none of torchrun's: rank, number of processes, rank on this machine."""


def member(environment: Mapping[str, str] = os.environ) -> Member | None:
    """Which process of a distributed program this is; None where it is not one.

    torchrun's variables go first: ``srun torchrun`` has both.
    """
    here = member_of_torchrun(environment)
    if here is not None:
        return here
    others = (_member(environment, names) for names in _OTHERS)
    return next((one for one in others if one is not None and one.world_size > 1), None)


def place_in_job(environment: Mapping[str, str] = os.environ) -> str:
    """What launchers call this process; the same in the processes that it starts, but for those that it starts as ranks."""
    return " ".join(environment.get(names[0], "-") for names in (_TORCHRUN, *_OTHERS))


def member_of_torchrun(environment: Mapping[str, str] = os.environ) -> Member | None:
    """The same by the variables of torchrun, accelerate and deepspeed alone."""
    return _member(environment, _TORCHRUN)


def _member(environment: Mapping[str, str], names: tuple[str, str, str]) -> Member | None:
    try:
        rank, size = int(environment[names[0]]), int(environment[names[1]])
        local = int(environment.get(names[2], rank))
    except (KeyError, ValueError):
        return None
    return Member(rank=rank, world_size=size, local_rank=local) if 0 <= rank < size else None


def header(*, watched: bool = True) -> Header:
    """The first record of this process's trace."""
    here = member()
    rank, world_size = (here.rank, here.world_size) if here is not None else (0, 1)
    return Header(created=time.time(), pid=os.getpid(), rank=rank, world_size=world_size, watched=watched)


def rank_directory(directory: Path, rank: int) -> Path:
    """Where a rank records in the directory of a run."""
    return directory / f"{_NAME}{rank}"


def rank_directories(directory: Path) -> dict[int, Path]:
    """The directories of the ranks that a run has had, in order; empty for a run of one process."""
    return _numbered(directory, _NAME)


def _numbered(directory: Path, name: str) -> dict[int, Path]:
    """The directories that are called so with a number behind it, in order."""
    found = {path.name.removeprefix(name): path for path in directory.glob(f"{name}*") if is_real_directory(path)}
    return {int(number): found[number] for number in sorted(filter(str.isdecimal, found), key=int)}


def node_directories(directory: Path) -> list[Path]:
    """The directories of the machines that have recorded in the folder of a job, in order."""
    return list(_numbered(directory, NODE).values())


def child_directory(directory: Path, number: int) -> Path:
    """Where the process that another one, which records in ``directory``, has spawned as its ``number``-th records, from 1."""
    return directory / f"{_CHILD}{number}"


def child_directories(directory: Path) -> dict[int, Path]:
    """The directories of the processes that one has spawned, in order."""
    return _numbered(directory, _CHILD)


def lead(directory: Path, rank: int) -> None:
    """Makes ``rank`` the one that the run's report is about."""
    link = directory / LEADING
    link.unlink(missing_ok=True)
    link.symlink_to(rank_directory(directory, rank).name)


def leading_directory(directory: Path) -> Path:
    """The trace directory of a run: that of its leading rank, or ``directory`` itself for a run of one process."""
    ranks = rank_directories(directory)
    if not ranks:
        return directory
    try:
        named = os.readlink(directory / LEADING)
    except OSError:
        named = ""
    return next((path for path in ranks.values() if path.name == named), next(iter(ranks.values())))


T = TypeVar("T", bound=tuple[Any, ...])

RUNS = 12
"""Runs of equal items that are looked back at."""
MOST_KNOWN = 20_000
"""Contexts that are remembered, before all are forgotten."""


class Succession(Generic[T]):
    """Expects what came the last time after the same runs of equal items.

    Where these never came, what came the last time after as many equal items in a row, and else after the same item: a loop over one item is known from its
    second round on.
    """

    def __init__(self) -> None:
        self._last: T | None = None
        self._in_a_row = 0
        self._runs: deque[tuple[T | None, int]] = deque(maxlen=RUNS)
        self._after: dict[Any, T] = {}

    def expected(self) -> T | None:
        """The next item; None where nothing is known."""
        for context in self._contexts():
            if (item := self._after.get(context)) is not None:
                return item
        return None

    def goes_on(self, beginning: tuple[Any, ...]) -> bool:
        """Takes the item that was to be expected for the next one, if it begins so; its contexts are made once."""
        contexts = self._contexts()
        for context in contexts:
            if (item := self._after.get(context)) is not None:
                break
        else:
            return False
        if item[: len(beginning)] != beginning:
            return False
        self._follows(contexts, item)
        return True

    def came(self, item: T) -> None:
        """The next item is this one."""
        self._follows(self._contexts(), item)

    def _follows(self, contexts: tuple[Any, ...], item: T) -> None:
        if len(self._after) > MOST_KNOWN:
            self._after.clear()
        for context in contexts:
            self._after[context] = item
        if item == self._last:
            self._in_a_row += 1
            return
        self._runs.append((self._last, self._in_a_row))
        self._last, self._in_a_row = item, 1

    def _contexts(self) -> tuple[Any, ...]:
        """What has come so far, the longest first."""
        return (*self._runs, (self._last, self._in_a_row)), (self._last, self._in_a_row), (self._last,)
