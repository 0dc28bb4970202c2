"""Opens what several processes have recorded, together: those of one run, or of a job that something else has started."""

from dataclasses import replace
from pathlib import Path

from dtypedoctor.diagnosis.distributed import leading_rank
from dtypedoctor.errors import UsageError
from dtypedoctor.runner.run import BEFORE, SavedRun, open_run
from dtypedoctor.trace.ranks import rank_directories
from dtypedoctor.trials.ranks import ranks_of

__all__ = ["is_job", "open_job"]


def is_job(place: Path) -> bool:
    """Whether ``place`` holds the traces of several processes."""
    return bool(_directories(place))


def open_job(place: Path) -> SavedRun:
    """The run of the rank in which a failure began; its ``ranks`` are those that have left a trace.

    Raises:
        UsageError: none has, or they cannot be read.
    """
    saved: dict[int, SavedRun] = {}
    problem = UsageError(f"{place}: no trace here", "Give a directory that a run has left.")
    for rank, directory in _directories(place).items():
        try:
            saved[rank] = open_run(directory)
        except UsageError as error:  # this rank may have died before it had begun
            problem = error
    if not saved:
        raise problem
    ranks = tuple(replace(one.run, rank=rank) for rank, one in saved.items())
    leading = leading_rank(ranks_of(replace(ranks[0], ranks=ranks)))
    run = next(one for one in ranks if one.rank == leading)
    return replace(saved[leading], label=str(place), run=replace(run, ranks=ranks))


def _directories(place: Path) -> dict[int, Path]:
    return rank_directories(place) or rank_directories(place / BEFORE)
