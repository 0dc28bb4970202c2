"""Runs a scenario that failed once more with the op trace on, and says whether that run explains the first."""

from dataclasses import dataclass, replace

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.window import eager_window, shows_failure, suspicious_windows
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.scenario.request import Request, Window
from dtypedoctor.trials.later_runs import LaterRuns, was_asked_to_end
from dtypedoctor.trials.second_run import another_way, unconfirmed

__all__ = ["CloserLook", "look_closer"]

MAX_LOOKS = 2
"""Runs with the op trace on; each costs about as much as the first run."""
NOT_WANTED = "a second run was not wanted"
NOT_REPEATED = "a run that was stopped is not repeated"
NOTHING_POINTED = "nothing pointed to a moment at which to look closer"
STOPPED = "the second run was stopped before its end"
NOT_MADE = "the second run could not be made"
NOT_SEEN_AGAIN = "the failure did not come back in a second run, so no op trace shows it"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloserLook:
    """What came of looking a second time.

    Attributes:
        before: the first run.
        closer: the second, where it shows the same failure with the op trace on.
        no_closer: why there is none, where there is none.
        other: a second run that shows something else.
        doubt: what that run did instead, in words.
    """

    before: Run
    closer: Run | None = None
    no_closer: str = ""
    other: Run | None = None
    doubt: str = ""

    @property
    def seen(self) -> Run:
        """The run that the findings come from: the second where it explains the first."""
        return self.closer if self.closer is not None else self.before

    def weighed(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings; where a second run shows something else, none that it does not show as well is called proven."""
        return findings if self.other is None else unconfirmed(findings, self.other.trace, self.doubt)


def look_closer(scenario: Scenario, before: Run, later: LaterRuns, *, wanted: bool) -> CloserLook:
    """The same run again with the op trace on where the first one failed, or why there is none."""
    if not wanted:
        return CloserLook(before=before, no_closer=NOT_WANTED)
    if _was_stopped(before):
        return CloserLook(before=before, no_closer=NOT_REPEATED)
    look = _looked(scenario, before, later)
    if look.closer is None:
        return look
    doubt = another_way(before, look.closer)
    if not doubt:
        return look
    no_closer = f"a second run went another way: {doubt}"
    return replace(look, closer=None, no_closer=no_closer, other=look.closer, doubt=doubt)


def _looked(scenario: Scenario, before: Run, later: LaterRuns) -> CloserLook:
    """Opens the likeliest window; where the op trace shows that what looked like a failure got nowhere, the next one as well."""
    windows: list[Window] = []
    closer: Run | None = None
    while len(windows) < MAX_LOOKS and (unsettled := suspicious_windows((closer or before).trace)):
        windows.append(unsettled[0])
        label = "closer" if closer is None else f"closer-{len(windows)}"
        looked = later(label, Request(scenario=scenario, windows=windows, repeats="before"))
        if looked is None:
            return CloserLook(before=before, closer=closer, no_closer="" if closer is not None else NOT_MADE)
        if _was_stopped(looked):
            return CloserLook(before=before, no_closer=STOPPED)
        if not shows_failure(looked.trace):
            return _not_seen_again(scenario, before, later, may_look=len(windows) < MAX_LOOKS)
        closer = looked
    return CloserLook(before=before, closer=closer, no_closer="" if closer is not None else NOTHING_POINTED)


def _not_seen_again(scenario: Scenario, before: Run, later: LaterRuns, *, may_look: bool) -> CloserLook:
    """A failure that went away with the op trace may have been the compiler's: the call is made compiled and in eager mode."""
    window = eager_window(before.trace, analysis_of(before.trace).incidents) if may_look else None
    if window is not None:
        eager = later("closer-eager", Request(scenario=scenario, windows=[window], repeats="before"))
        if eager is not None and shows_failure(eager.trace):
            return CloserLook(before=before, closer=eager)
    return CloserLook(before=before, no_closer=NOT_SEEN_AGAIN, other=later.last, doubt=NOT_SEEN_AGAIN)


def _was_stopped(run: Run) -> bool:
    """Whether somebody, or the time limit, has ended it from outside."""
    return run.exit.timed_out or was_asked_to_end(run)
