"""Brings what several processes have recorded, the ranks of a job or what a script has spawned, to one run that stands for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from dtypedoctor.analysis import How, analysis_of, ended_at, ending_of, with_caught
from dtypedoctor.diagnosis.distributed import SENT, Rank, leading_rank, with_compared
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.results import RunSummary
from dtypedoctor.runner.run import Run, SavedRun, led_by, open_run
from dtypedoctor.trace.events import Header, Killed, Metric, Resources
from dtypedoctor.trace.ranks import BEFORE, node_directories, rank_directories
from dtypedoctor.trace.records.execution import LogFilter, ProcessGroup


def led_by_origin(run: Run) -> Run:
    """The run of the rank in which a failure began; of one process the run itself."""
    return led_by(run.ranks, leading_rank(ranks_of(run))) if run.ranks else run


def ranks_of(run: Run) -> tuple[Rank, ...]:
    """What the diagnosis wants to know of each rank; empty for a run of one process."""
    return tuple(
        Rank(
            number=one.rank if one.rank is not None else number,
            trace=one.trace,
            code=one.exit.code,
            ended=_ended(one),
            stopped=one.exit.timed_out and one.trace.end is None,
            lost=one.exit.unknown and one.trace.end is None,
        )
        for number, one in enumerate(run.ranks)
    )


def _ended(rank: Run) -> str:
    """How a rank ended, in words; what its launcher ended while it was ending by itself has not completed."""
    ending = ending_of(rank)
    is_unknown = ending.how is How.COMPLETED and rank.exit.ended_by_launcher
    return rank.exit.describe() if is_unknown else ended_at(rank)


def rank_of(run: Run) -> int:
    """The rank that ``run`` is about; 0 where there is one process only."""
    return run.rank or 0


class Leading:
    """Brings what the processes of a run have recorded to the run of one: where a failure began; of several runs the same spawned process in each."""

    def __init__(self) -> None:
        self._spawned: int | None = None

    def __call__(self, run: Run) -> Run:
        """The run that stands for all; exceptions that the program caught and did not get past are what it raised."""
        led = led_by_origin(with_caught(run))
        if not led.children:
            return led
        if self._spawned is None:
            self._spawned = _leading(led)
        if self._spawned not in led.children:  # the script itself, or in this run there is no such process
            return replace(led, others=tuple(led.children.values()))
        others = tuple(child for other, child in led.children.items() if other != self._spawned)
        lead, others = led.children[self._spawned], (replace(led, children={}), *others)
        killed = {record.process for other in others for record in other.trace.all(Killed)}
        is_ended = lead.trace.header is not None and lead.trace.header.pid in killed
        return replace(lead, exit=led.exit, spawned=self._spawned, others=others, ended_by_program=is_ended)


def said_of_spawned(findings: tuple[Finding, ...], run: Run) -> tuple[Finding, ...]:
    """The findings, with the process that they were seen in, if that is one that the script has spawned, and what several of them show together."""
    if run.spawned is None:
        return findings
    said = f"Seen in spawned process {run.spawned} of {len(run.others)}."
    told = tuple(replace(finding, evidence=(*finding.evidence, said)) for finding in findings)
    # the processes that belong to a process group, each with its rank there; of several jobs one after the other the last
    own: dict[int, Rank] = {}
    for process in run.processes:
        groups = process.trace.observed(ProcessGroup)
        number = groups[0].what.rank if groups else None
        if number is not None:
            own[number] = Rank(number=number, trace=process.trace, code=process.exit.code, ended="")
    return with_compared(told, [own[number] for number in sorted(own)])


def _leading(run: Run) -> int:
    """Number of the process to lead with, 0 for the script's own: the first with a finding, of several that work together the one in which it began, else the one that was measured most.

    The script's own comes last unless it was measured itself: what it raises is what a process that it has spawned raised.
    """
    others = {number: child for number, child in run.children.items() if child.trace.usable}
    processes = {0: run, **others} if run.trace.samples else {**others, 0: run}
    failed = {number: one for number, one in processes.items() if analysis_of(one.trace).failures}
    if not failed:
        return max({0: run, **others}.items(), key=lambda pair: len(pair[1].trace.samples))[0]
    began_in = _first_through_collectives({number: one for number, one in failed.items() if number})
    return next(iter(failed)) if began_in is None else began_in


def _first_through_collectives(failed: Mapping[int, Run]) -> int | None:
    """Number of the process in which it began, of several that work together: what arrived through a collective began elsewhere."""
    ranks = [Rank(number=number, trace=one.trace, code=one.exit.code, ended="") for number, one in failed.items()]
    together = len(ranks) > 1 and all(rank.collectives[SENT] for rank in ranks)
    return leading_rank(ranks) if together else None


def is_job(place: Path) -> bool:
    """Whether ``place`` holds the traces of several processes."""
    return bool(_directories(place))


def open_job(*places: Path) -> SavedRun:
    """The run of the rank in which a failure began; its ``ranks`` are those that have left a trace in one of ``places``.

    Raises:
        UsageError: none has, they cannot be read, or they are not of one job.
    """
    saved: dict[int, SavedRun] = {}
    problem = UsageError(f"{places[0]}: no trace here", "Give a directory that a run has left.")
    for place in places:
        if len(places) > 1 and not _directories(place):
            raise UsageError(f"{place}: no trace of a job here", "Give run directories of machines of one job.")
        for rank, directory in _directories(place).items():
            if rank in saved:
                raise UsageError(
                    f"rank {rank} was recorded twice, in {saved[rank].run.directory} and {directory}",
                    "Give run directories of machines of one job, each once.",
                )
            try:
                saved[rank] = open_run(directory)
            except UsageError as error:  # this rank may have died before it had begun
                problem = error
    if not saved:
        raise problem
    _require_one_job(saved)
    ranks = tuple(replace(one.run, rank=rank) for rank, one in sorted(saved.items()))
    leading = leading_rank(ranks_of(replace(ranks[0], ranks=ranks)))
    run = next(one for one in ranks if one.rank == leading)
    return replace(saved[leading], label=", ".join(map(str, places)), run=replace(run, ranks=ranks))


TOGETHER = 1800.0
"""Seconds within which the ranks of one job begin: torchrun waits 600 for its machines, and their clocks may differ."""


def _require_one_job(saved: Mapping[int, SavedRun]) -> None:
    """Raises a UsageError where the ranks belong to several jobs: another number of processes, or another time."""
    first: tuple[int, Header] | None = None
    for rank, one in saved.items():
        own = one.run.trace.header
        if own is None:
            continue
        first = first or (rank, own)
        if own.world_size != first[1].world_size:
            why = f"rank {first[0]} is one of {first[1].world_size:,}, rank {rank} one of {own.world_size:,}"
        elif abs(own.created - first[1].created) > TOGETHER:
            why = f"ranks {first[0]} and {rank} began {abs(own.created - first[1].created) / 3600:,.1f} hours apart"
        else:
            continue
        raise UsageError(f"these are not of one job: {why}", "Give run directories of machines of one job.")


def _directories(place: Path) -> dict[int, Path]:
    """The directories of ranks: of a job, a run, or a folder in which several machines have recorded one."""
    found = rank_directories(place) or rank_directories(place / BEFORE)
    for node in () if found else reversed(node_directories(place)):
        found |= rank_directories(node / BEFORE)
    return dict(sorted(found.items()))


COMPARED = ("loss", "grad_norm", "reward")
"""Quantities of a step that a summary has, and two runs are compared by."""


def summarise(label: str, run: Run, steps_planned: int = 0) -> RunSummary:
    """The row of ``run`` in the before/after table."""
    trace = run.trace
    metrics = trace.all(Metric)
    resources = trace.last(Resources)
    times = [m.values["step_time"] for m in metrics if "step_time" in m.values]
    return RunSummary(
        label=label,
        steps_completed=trace.steps_done,
        steps_planned=steps_planned,
        loss=_series("loss", metrics),
        grad_norm=_series("grad_norm", metrics),
        reward=_series("reward", metrics),
        step_time=median(times[1:] or times) if times else None,
        peak_memory=resources.peak_memory if resources else None,
        ended=ending_of(run).words,
        finding_ids=tuple(dict.fromkeys(f.id for f in analysis_of(trace).findings)),
        seconds=round(run.exit.seconds, 3),
        nonfinite=_nonfinite(metrics),
        log_filter=next((seen.what.trainer for seen in trace.observed(LogFilter)), ""),
    )


def _nonfinite(metrics: Sequence[Metric]) -> dict[str, dict[str, str]]:
    """``nonfinite`` of a :class:`RunSummary`."""
    found: dict[str, dict[str, str]] = {}
    for position, metric in enumerate(metrics):
        for name in COMPARED:
            if name in metric.nonfinite:
                found.setdefault(name, {})[str(position)] = metric.spelled.get(name, "nan")
    return found


def _series(name: str, metrics: Sequence[Metric]) -> tuple[float | None, ...]:
    """The values of one quantity, None where it was not finite; empty where the run does not have it at all."""
    known = any(name in metric.values or name in metric.nonfinite for metric in metrics)
    return tuple(metric.values.get(name) for metric in metrics) if known else ()
