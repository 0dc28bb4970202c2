"""Brings the runs of several ranks to what a treatment works with: one run that stands for all."""

from dtypedoctor.analysis import ending_of
from dtypedoctor.diagnosis.distributed import Rank, leading_rank
from dtypedoctor.runner.run import Run
from dtypedoctor.runner.script import led_by
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.later_runs import RunRequest

__all__ = ["led", "rank_of", "ranks_of"]


def led(run: RunRequest) -> RunRequest:
    """``run``, whose results are those of the rank in which a failure began."""

    def launch(label: str, request: Request) -> Run:
        finished = run(label, request)
        return led_by(finished.ranks, leading_rank(ranks_of(finished))) if finished.ranks else finished

    return launch


def ranks_of(run: Run) -> tuple[Rank, ...]:
    """What the diagnosis wants to know of each rank; empty for a run of one process."""
    return tuple(
        Rank(
            number=one.rank if one.rank is not None else number,
            trace=one.trace,
            code=one.exit.code,
            ended=ending_of(one).words,
            stopped=one.exit.timed_out and one.trace.end is None,
        )
        for number, one in enumerate(run.ranks)
    )


def rank_of(run: Run) -> int:
    """The rank that ``run`` is about; 0 where there is one process only."""
    return run.rank or 0
