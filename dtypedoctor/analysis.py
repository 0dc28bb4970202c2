"""What a trace says and how its run ended, worked out once: trials, bisections, comparisons and reports read fields."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.incidents import MEASURED, Incident, incidents
from dtypedoctor.diagnosis.nonfinite_origin import unexplained
from dtypedoctor.diagnosis.ops import OpGraph, graph_of
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.diagnosis.wording import failing_line
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Metric, Raised, Root, Sample, Site
from dtypedoctor.trace.model import Trace

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
        """The exception that the run failed with, whether or not the program caught it; see :mod:`dtypedoctor.trials.caught`."""
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
            How.INTERRUPTED.value if interrupted else raised.type, raised, run.trace.moment(raised.step) if told else ""
        )
        return Ending(how=How.INTERRUPTED if interrupted else How.RAISED, words=words, raised=raised)
    if run.foreign and run.exit.code != 0:
        return Ending(how=How.STATUS, words=run.exit.describe())
    return Ending(how=How.COMPLETED, words=How.COMPLETED.value)


def _exception(name: str, raised: Raised, moment: str) -> str:
    """An exception in words; ``moment`` is the step or call, and empty where that says nothing."""
    place = f" in {moment} ({raised.phase})" if moment else ""
    first_line = raised.message.splitlines()[0] if raised.message else ""
    return f"{name}{place}" + (f": {first_line[:160]}" if first_line else "")
