"""What a trace says, how its run ended and which caught exceptions count as failures.

It is worked out once for each trace: trials, bisections, comparisons and reports read fields.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from operator import attrgetter

from dtypedoctor.diagnosis import diagnose, spec_of
from dtypedoctor.diagnosis.distributed import OF_ANOTHER_RANK
from dtypedoctor.diagnosis.incidents import MEASURED, Incident, incidents, rejects_value
from dtypedoctor.diagnosis.nonfinite_origin import unexplained
from dtypedoctor.diagnosis.ops import OpGraph, graph_of
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.diagnosis.wording import (
    complaint_of,
    failing_line,
    how_the_run_ended,
    is_dtype_error,
    is_own_statement,
    own_line,
    what_became_of,
)
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Caught, Metric, Raised, Root, Sample, Site
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ReturnedSince

Place = tuple[str | None, ...]
"""Where something fails, in terms that are the same for two runs that fail alike."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """What a trace says. There is one for each trace: :func:`analysis_of`."""

    trace: Trace

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What the detectors see, the root cause before its consequences."""
        return diagnose(self.trace)

    @cached_property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that are more than a note."""
        return tuple(finding for finding in self.findings if finding.severity is not Severity.INFO)

    @property
    def graph(self) -> OpGraph:
        """The op trace as a graph."""
        return graph_of(self.trace)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Everything that is not finite and matters, the earliest first."""
        return incidents(self.trace)

    @cached_property
    def unexplained(self) -> Incident | None:
        """The first incident that the op trace does not show to be harmless, and that is no business of the loss scale's."""
        return unexplained(self.trace)

    @cached_property
    def measured_incident(self) -> Incident | None:
        """The first incident of a measured value; not one that only an exception or a number in Python tells of."""
        return next((found for found in self.incidents if found.sample is not None and found.site is not None), None)

    @property
    def first_nonfinite(self) -> tuple[Sample, Site] | None:
        """The earliest measured value that is not finite and matters, and where it was measured."""
        found = self.measured_incident
        return (found.sample, found.site) if found is not None and found.sample and found.site else None

    @cached_property
    def first_bad(self) -> tuple[Sample, Site] | None:
        """The earliest measured value that is not finite, whether or not it matters; inputs of modules are not asked."""
        measured = self.trace.measured()
        return next(((sample, site) for sample, site in measured if not sample.finite and site.kind in MEASURED), None)

    @cached_property
    def nonfinite_metrics(self) -> tuple[Metric, ...]:
        """The numbers of the workload's steps in which at least one is not finite."""
        return tuple(metric for metric in self.trace.all(Metric) if metric.nonfinite)

    @property
    def raised(self) -> Raised | None:
        """The exception that the run failed with, whether or not the program caught it; see :mod:`dtypedoctor.analysis`."""
        return self.trace.last(Raised)

    @property
    def uncaught(self) -> Raised | None:
        """The exception that ended the run."""
        return next((record for record in reversed(self.trace.all(Raised)) if not record.caught), None)

    @cached_property
    def places(self) -> frozenset[Place]:
        """Where the run fails: the first place that is not finite, else where it raises, else what is found in it."""
        if self.first_nonfinite is not None:
            site = self.first_nonfinite[1]
            return frozenset({("nonfinite", site.fqn, site.phase)})
        if self.raised is not None:
            return frozenset({("raised", self.raised.type, failing_line(self.raised))})
        return frozenset(("finding", finding.id, finding.fqn) for finding in self.failures)


def analysis_of(trace: Trace) -> Analysis:
    """The analysis of ``trace``: always the same one, so that nothing is worked out twice."""
    return trace.once(Analysis)


class How(StrEnum):
    """How a run can end."""

    COMPLETED = "completed"
    RAISED = "raised"
    INTERRUPTED = "interrupted"
    """Somebody stopped it with Ctrl-C."""
    STATUS = "status"
    """A script left with an exit status other than 0, and nothing was raised that was seen."""
    DIED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended.

    Attributes:
        words: the same in words: ``completed``, the exception, or how the process ended.
        raised: the exception that ended it; None where none did.
    """

    how: How
    words: str
    raised: Raised | None = None

    @property
    def completed(self) -> bool:
        """Whether it came to its end."""
        return self.how is How.COMPLETED


def ending_of(run: Run) -> Ending:
    """How ``run`` ended."""
    if run.died:
        return Ending(how=How.DIED, words=run.last_words())
    raised = analysis_of(run.trace).uncaught
    if raised is not None:
        interrupted = raised.type == "KeyboardInterrupt"
        told = not run.foreign or bool(run.trace.all(Root))
        words = _exception(
            How.INTERRUPTED.value if interrupted else raised.type, raised, run.trace.when(raised) if told else ""
        )
        return Ending(how=How.INTERRUPTED if interrupted else How.RAISED, words=words, raised=raised)
    if run.foreign and run.exit.code != 0:
        return Ending(how=How.STATUS, words=run.exit.describe())
    return Ending(how=How.COMPLETED, words=How.COMPLETED.value)


def ended_at(run: Run) -> str:
    """How ``run`` ended, in words; an exception with the program's own line, and one that another rank's end has led to with that."""
    ending = ending_of(run)
    line = own_line(ending.raised) if ending.raised is not None else None
    if ending.raised is None or line is None:
        return ending.words
    name, message = ending.raised.type, ending.raised.message
    if OF_ANOTHER_RANK.search(message):
        said = _BRACKET.sub("", message).partition(". ")[0][:160]
        return f"{name} at {line}, because another rank had ended: {said}"
    return ending.words.replace(name, f"{name} at {line}", 1)


_BRACKET = re.compile(r"^\[[^\]]*\]\s*")
"""Where in the backend's own source an exception comes from."""


def _exception(name: str, raised: Raised, when: str) -> str:
    """An exception in words; ``when`` is the step or call, and empty where that says nothing."""
    place = f" {when}" if when else ""
    first_line = raised.message.splitlines()[0] if raised.message else ""
    return f"{name}{place}" + (f": {first_line[:160]}" if first_line else "")


_OF_A_SCALER = ("Attempting to unscale", "No inf checks were recorded")
OFTEN = 3
"""An operator outside of modules that raises so often is no probe, even if the program computes something else in between."""
_OF_MEMORY = "out of memory"


def with_caught(run: Run) -> Run:
    """The run, with an exception that the program caught as what it raised, where that is a failure and nothing worse was raised.

    It is none where the program went on from there: where the module that raised it has returned since, or the call around it,
    or an optimizer has made a step; nor in a test that passes. One that has ended a thread was not caught, and is one whatever other threads do.
    """
    run = replace(
        run,
        ranks=tuple(map(with_caught, run.ranks)),
        children={number: with_caught(child) for number, child in run.children.items()},
    )
    raised = run.trace.last(Raised)
    failure = None
    if raised is None or not _is_complaint(raised):
        failure = next(_failures(run), None)
    if failure is None:
        return run
    trace = run.trace
    return replace(run, trace=replace(trace, records=(*trace.records, failure.raised())))


def noted(run: Run, findings: Sequence[Finding]) -> Iterator[str]:
    """The exceptions about dtypes or values that the program caught, each in words: those that it went on from, and one that no finding explains.

    Args:
        run: was judged with :func:`with_caught`.
        findings: those of the run.
    """
    failed, caught = run.trace.last(Raised), run.trace.all(Caught)
    in_threads = {(error.type, error.message) for error in caught if error.thread}
    is_explained = Severity.ERROR in map(attrgetter("severity"), findings)
    for error in filter(_is_complaint, caught):
        if error.ending or (error.type, error.message) in in_threads:  # nobody has caught it
            continue
        if failed is None or not _is_same(error, failed):
            yield _said_of(error, run.trace, _WENT_ON)
        elif failed.caught and not is_explained:
            yield _said_of(error, run.trace, _NOT_EXPLAINED)


def _said_of(caught: Caught, trace: Trace, how: str) -> str:
    where = f" in {caught.modules[-1]}" if caught.modules and caught.modules[-1] else ""
    said = caught.message.splitlines()[0][:160] if caught.message else ""
    return f"{caught.type}{where} in {trace.moment(caught.step)}: the program caught it {how}: {said}"


_WENT_ON = "and continued, so it does not count as a failure"
_NOT_EXPLAINED = (
    "and nothing that raised it succeeded later; no rule explains it, so let it end the program to see where"
)


def said_of_caught(findings: tuple[Finding, ...], trace: Trace) -> tuple[Finding, ...]:
    """The findings; those that only an exception shows after which the program went on say so."""
    raised = trace.last(Raised)
    if raised is None or not raised.caught:
        return findings
    became = f"was raised {trace.when(raised)} and {what_became_of(raised)}."
    evidence = set(how_the_run_ended(trace))
    was_measured = analysis_of(trace).measured_incident is not None

    def said_of(finding: Finding) -> Finding:
        is_value = spec_of(finding.id).nonfinite
        if evidence.isdisjoint(finding.evidence) or (was_measured and is_value):
            return finding
        # A value is not raised: an exception has followed from it.
        return replace(finding, summary=f"{finding.summary} {raised.type if is_value else 'It'} {became}")

    return tuple(map(said_of, findings))


def _failures(run: Run) -> Iterator[Caught]:
    """The exceptions that are failures, the likeliest first: what the program ended with, then what it never got past."""
    complaints = list(_complaints(run))
    for ending in complaints:
        if ending.ending:
            yield replace(next(one for one in complaints if _is_same(one, ending)), thread=ending.thread)
    for caught in complaints:
        if not caught.ending and not _went_on(run.trace, caught):
            yield caught


def _complaints(run: Run) -> Iterator[Caught]:
    """The exceptions about dtypes or values, those left out that a test expects which passes."""
    everything = run.trace.all(Caught)
    failed = [caught for caught in everything if caught.tested and caught.ending]
    for caught in everything:
        in_failed = any(_is_same(caught, one) for one in failed) if failed else run.exit.code != 0
        if _is_complaint(caught) and (in_failed or not caught.tested):
            yield caught


def _is_same(one: Caught, other: Raised) -> bool:
    return (one.type, one.message) == (other.type, other.message)


def _is_complaint(raised: Raised) -> bool:
    """Whether torch or a library has raised an exception about dtypes or values. That memory ran out is a reason to try a smaller batch."""
    if _OF_MEMORY in raised.message or is_own_statement(raised):
        return False
    return (
        is_dtype_error(raised)
        or complaint_of(raised.message) is not None
        or rejects_value(raised)
        or any(words in raised.message for words in _OF_A_SCALER)
    )


def _went_on(trace: Trace, caught: Caught) -> bool:
    """Whether what raised it, or what was around it, has succeeded since, or the program has gone on training."""
    if _has_returned(trace, caught) or any(metric.n > caught.n for metric in trace.all(Metric)):
        return True
    if _is_outside(caught) and sum(_is_same(one, caught) for one in trace.all(Caught)) >= OFTEN:
        return False
    later = (sample for sample in trace.samples if sample.n >= caught.n)
    return any(_is_success(sample, trace.sites[sample.site], caught) for sample in later)


def _has_returned(trace: Trace, caught: Caught) -> bool:
    """Whether the operator outside of modules that raised it has returned since, from operands of the same shapes."""
    return any(seen.what.caught == caught.n for seen in trace.observed(ReturnedSince))


def _is_outside(caught: Caught) -> bool:
    """Whether an operator outside of all modules raised it."""
    return caught.root < 0 and not caught.modules and caught.phase in ("forward", "generate")


def _is_success(sample: Sample, site: Site, caught: Caught) -> bool:
    """Whether a measurement shows an optimizer's step, or the return of what had raised ``caught`` or of the call around it."""
    if site.kind == "param" and site.phase == "optimizer":
        return True
    if _is_outside(caught):
        return site.kind in ("output", "loss")
    raised_in = (caught.root, caught.modules[-1] if caught.modules else "")
    return site.kind == "output" and (sample.call == caught.call or (site.root, site.fqn) == raised_in)
