"""What the treatment of a scenario found out, as one value."""

from dataclasses import dataclass

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.results import Observer, RunSummary, Trial

__all__ = ["Treatment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Everything that was found out about a scenario.

    Attributes:
        before: the untreated run.
        closer: the second look at the same failure with the op trace on, if there was anything to look at.
        no_closer: why there is no second look, where there is none.
        diagnosed: the trace that the findings come from (the closer look's where there is one).
        complete: whether remedies were to be tried, so that the scenario's expectation can be judged.
        replayed: of a second look that is a replay of a part of the run, how it was compared with it.
        refusals: the runs after the first that could not be made, and why.
    """

    scenario: Scenario
    before: Run
    before_summary: RunSummary
    closer: Run | None
    no_closer: str
    diagnosed: Trace
    findings: tuple[Finding, ...]
    observer: Observer
    reference: Run | None
    reference_summary: RunSummary | None
    trials: tuple[Trial, ...]
    complete: bool
    refusals: tuple[str, ...] = ()
    replayed: str = ""
