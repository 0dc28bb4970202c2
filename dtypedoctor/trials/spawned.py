"""Brings the processes that a script has spawned to what a treatment works with: one run that stands for all."""

from dataclasses import replace

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.distributed import SENT, Rank, leading_rank
from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.later_runs import RunRequest

__all__ = ["led_by_spawned", "said_of_spawned"]


def led_by_spawned(run: RunRequest) -> RunRequest:
    """``run``, whose results are those of the process in which something is found first; the same one in each run."""
    chosen: list[int] = []

    def launch(label: str, request: Request) -> Run:
        finished = run(label, request)
        if not finished.children:
            return finished
        if not chosen:
            chosen.append(_leading(finished))
        return _led_by(finished, chosen[0])

    return launch


def said_of_spawned(findings: tuple[Finding, ...], run: Run) -> tuple[Finding, ...]:
    """The findings, with the process that they were seen in, if that is one that the script has spawned."""
    if run.spawned is None:
        return findings
    said = f"Seen in spawned process {run.spawned} of {len(run.others)}."
    return tuple(replace(finding, evidence=(*finding.evidence, said)) for finding in findings)


def _leading(run: Run) -> int:
    """Number of the process to lead with, 0 for the script's own: the first with a finding, of several that work together the one in which it began, else the one that was measured most.

    The script's own comes last unless it was measured itself: what it raises is what a process that it has spawned raised.
    """
    own = [(0, run)]
    others = [(number, child) for number, child in run.children.items() if child.trace.usable]
    failed = [
        pair
        for pair in ([*own, *others] if run.trace.samples else [*others, *own])
        if analysis_of(pair[1].trace).failures
    ]
    together = [Rank(number=n, trace=one.trace, code=one.exit.code, ended="") for n, one in failed if n]
    if len(together) > 1 and all(rank.collectives[SENT] for rank in together):
        return leading_rank(together)  # what arrived through a collective began elsewhere
    if failed:
        return failed[0][0]
    return max([*own, *others], key=lambda pair: len(pair[1].trace.samples))[0]


def _led_by(run: Run, number: int) -> Run:
    if number not in run.children:  # the script itself, or in this run there is no such process
        return replace(run, others=tuple(run.children.values()))
    others = tuple(child for other, child in run.children.items() if other != number)
    lead = run.children[number]
    return replace(lead, exit=run.exit, spawned=number, others=(replace(run, children={}), *others))
