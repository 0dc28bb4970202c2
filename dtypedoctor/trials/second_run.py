"""Looks at a failure with the op trace on: in calls that the run itself has made again, or in another run of the scenario."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dtypedoctor.analysis import How, analysis_of, ending_of
from dtypedoctor.diagnosis.incidents import Incident
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.window import eager_window, shows_failure, suspicious_windows
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Request, Scenario, Window
from dtypedoctor.trace.events import REPLAY_OF_FAILURES, NotWatched, Raised, Sample, Site
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import EAGER, CompileCounts, ReplayedCall
from dtypedoctor.trials.remedies import is_script
from dtypedoctor.trials.runs import LaterRuns, was_asked_to_end

__all__ = ["CloserLook", "another_way", "in_place", "look_closer", "unconfirmed"]


MAX_LOOKS = 2
"""Runs with the op trace on; each costs about as much as the first run."""
NOT_REPEATED = "a run that was stopped is not repeated"
NOTHING_POINTED = "not needed"
STOPPED = "the second run was stopped before its end"
NOT_MADE = "the second run could not be made"
NOT_SEEN_AGAIN = "the failure did not come back in a second run, so no op trace shows it"
NOT_RECURRED = "the failure did not recur"
NOT_REPLAYED = "nothing could be replayed: {}"
NO_CALL = "what failed is no module call"
TELLS_OPERATOR = "{}; another run can record the operator that failed"
MAY_PROVE = "{}; another run may prove the finding"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloserLook:
    """What came of looking at a failure with the op trace on.

    Attributes:
        before: the first run.
        closer: the second, where it shows the same failure with the op trace on.
        no_closer: why there is none, where there is none.
        other: a second run that shows something else.
        doubt: what that run did instead, in words.
        certificate: of calls that were made again, how they were compared with the run, as a sentence.
        differs: how the bits of a replay differ from those of the run, as a clause.
        rerun_differs: of a script that was run again, what it did otherwise, as a clause; empty where it did the same.
        rerun_tells: what another run would tell that is not known now, as a clause; empty where it would tell nothing.
    """

    before: Run
    closer: Run | None = None
    no_closer: str = ""
    other: Run | None = None
    doubt: str = ""
    certificate: str = ""
    differs: str = ""
    rerun_differs: str = ""
    rerun_tells: str = ""

    @property
    def seen(self) -> Run:
        """The run that the findings come from: the second where it explains the first."""
        return self.closer if self.closer is not None else self.before

    def cap_confidence(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings; where a second run shows something else, none that it does not show as well is called proven."""
        if self.differs:
            return tuple(
                _capped(finding, f"It was explained by a replay that is not bitwise identical: {self.differs}.")
                for finding in findings
            )
        return findings if self.other is None else unconfirmed(findings, self.other.trace, self.doubt)


def look_closer(scenario: Scenario, before: Run, later: LaterRuns, *, may_rerun: bool) -> CloserLook:
    """The failure with the op trace on, or why there is no such look at it.

    A script has made what failed again itself, when it failed. It is run again only where that does not explain the failure.

    Args:
        scenario: what was run.
        before: the run.
        later: runs it again.
        may_rerun: whether it may be run again.
    """
    if not is_script(scenario):
        return _run_again(scenario, before, later, "closer") if may_rerun else CloserLook(before=before)
    look = in_place(before)
    if not look.rerun_tells or not may_rerun or _was_stopped(before):
        return look
    again = _run_again(scenario, before, later, "rerun")
    differs = NOT_RECURRED if again.no_closer == NOT_SEEN_AGAIN else again.doubt
    return replace(look if again.closer is None and look.closer is not None else again, rerun_differs=differs)


def _run_again(scenario: Scenario, before: Run, later: LaterRuns, label: str) -> CloserLook:
    if _was_stopped(before):
        return CloserLook(before=before, no_closer=NOT_REPEATED)
    look = _looked(scenario, before, later, label)
    doubt = another_way(before, look.closer) if look.closer is not None else ""
    return _doubted(look, f"a second run went another way: {doubt}", doubt) if doubt else look


def in_place(before: Run) -> CloserLook:
    """What a run has left of calls that it made again itself, where they failed, or why there is nothing of the kind."""
    if before.trace.observed(ReplayedCall):
        return _replayed_in_place(before)
    if not suspicious_windows(before.trace) or _explains_what_it_raised(before.trace):
        return CloserLook(before=before, no_closer=NOTHING_POINTED)
    why = NOT_REPLAYED.format(_why_not_in_place(before) or NO_CALL)
    return CloserLook(before=before, no_closer=why, rerun_tells=TELLS_OPERATOR.format(why))


def _explains_what_it_raised(trace: Trace) -> bool:
    """Whether a run knows why it has raised, outside of module calls: the operator was seen there, and tried with other dtypes."""
    analysis = analysis_of(trace)
    first = next(iter(analysis.findings), None)
    return analysis.uncaught is not None and first is not None and first.confidence is Confidence.PROVEN


def _replayed_in_place(before: Run) -> CloserLook:
    """The op trace of a run, of calls that it made again; where one of these went differently, what is seen without it."""
    seen = [record.what for record in before.trace.observed(ReplayedCall)]
    begun = f"Op trace: {_number_of(seen)} replayed in the process itself, {_moment_of(seen)}"
    doubt = next((what.doubt for what in seen if what.doubt), "")
    if doubt:
        words = f"{begun}; the replay differed: {doubt}."
        return CloserLook(
            before=before,
            certificate=words,
            differs=doubt,
            rerun_tells=MAY_PROVE.format(f"the replay differed: {doubt}"),
        )
    uncompiled = [what for what in seen if what.why == EAGER]
    if uncompiled:
        begun = f"{begun}, {_number_of(uncompiled)} in eager mode, where the results are finite"
    equal, comparable = sum(what.compared for what in seen), len(seen) - len(uncompiled)
    if not comparable:
        return CloserLook(before=before, certificate=f"{begun}.")
    compared = (
        "the results are" if equal == comparable else f"{equal} of {comparable} results could be compared, and are"
    )
    return CloserLook(before=before, certificate=f"{begun}; {compared} bitwise equal.")


def _number_of(replays: Sequence[ReplayedCall]) -> str:
    steps = sum(replay.why == "optimizer" for replay in replays)
    calls = len(replays) - steps
    parts = [f"{calls} failed call{'s' if calls > 1 else ''}"] if calls else []
    return " and ".join([*parts, *(["1 optimizer step"] if steps else [])])


def _moment_of(replays: Sequence[ReplayedCall]) -> str:
    """When calls were made again, and with which parameters, as a clause."""
    if any(replay.late for replay in replays):
        return "after its parameters had been updated"
    if any(replay.copies for replay in replays):
        return "once the failure was known, with copies of the parameters"
    return "at the moment of the failure"


def _why_not_in_place(before: Run) -> str:
    """Why the run itself could not make the failing call again; empty where it was not asked to."""
    said = (note.why for note in before.trace.all(NotWatched) if note.what == REPLAY_OF_FAILURES)
    return next(said, "")


def _doubted(look: CloserLook, why: str, doubt: str) -> CloserLook:
    return replace(look, closer=None, no_closer=why, other=look.closer, doubt=doubt)


def _looked(scenario: Scenario, before: Run, later: LaterRuns, label: str) -> CloserLook:
    """Opens the likeliest window; where the op trace shows that what looked like a failure got nowhere, the next one as well.

    ``label`` names the directory of the run, and begins the names of the next ones.
    """
    windows: list[Window] = []
    closer: Run | None = None
    while len(windows) < MAX_LOOKS and (unsettled := suspicious_windows((closer or before).trace)):
        windows.append(unsettled[0])
        name = label if closer is None else f"{label}-{len(windows)}"
        looked = later(name, Request(scenario=scenario, windows=windows, repeats="before"))
        if looked is None:
            return CloserLook(before=before, closer=closer, no_closer="" if closer is not None else NOT_MADE)
        if _was_stopped(looked):
            return CloserLook(before=before, no_closer=STOPPED)
        if not shows_failure(looked.trace):
            return _not_seen_again(scenario, before, later, label, may_look=len(windows) < MAX_LOOKS)
        closer = looked
    return CloserLook(before=before, closer=closer, no_closer="" if closer is not None else NOTHING_POINTED)


def _not_seen_again(scenario: Scenario, before: Run, later: LaterRuns, label: str, *, may_look: bool) -> CloserLook:
    """A failure that went away with the op trace may have been the compiler's: the call is made compiled and in eager mode."""
    window = eager_window(before.trace, analysis_of(before.trace).incidents) if may_look else None
    if window is not None:
        eager = later(f"{label}-eager", Request(scenario=scenario, windows=[window], repeats="before"))
        if eager is not None and shows_failure(eager.trace):
            return CloserLook(before=before, closer=eager)
    return CloserLook(before=before, no_closer=NOT_SEEN_AGAIN, other=later.last, doubt=NOT_SEEN_AGAIN)


def _was_stopped(run: Run) -> bool:
    """Whether somebody, or the time limit, has ended it from outside."""
    return run.exit.timed_out or was_asked_to_end(run)


def another_way(first: Run, second: Run) -> str:
    """How the second run differs from the first in what fails, where and when; empty where it does not.

    The second run may measure more: code that was compiled runs its modules, and every step is looked at. Ctrl-C, which has ended the first,
    is nothing that the program does: how the second ends says nothing then.
    """
    again = next((run for run in second.ranks if run.rank == first.rank), second).trace
    one, other = analysis_of(first.trace).raised, analysis_of(again).raised
    if ending_of(first).how is not How.INTERRUPTED and _key(one, first.trace) != _key(other, first.trace):
        return f"the first run {_raised(one, first.trace)}, the second {_raised(other, again)}"
    incident = analysis_of(first.trace).measured_incident
    if incident is None:
        return ""
    return _earlier(first.trace, again, before=incident.step) or _not_again(first.trace, again, incident)


def _earlier(first: Trace, second: Trace, *, before: int) -> str:
    """What is not finite in the second run in an earlier step, where the first run was finite; empty where nothing is."""
    early = analysis_of(second).measured_incident
    if early is None or early.site is None or not _is_new(first, early, before=before):
        return ""
    place, when = short(early.site.fqn), first.moment(early.step)
    return f"in the second run {place} was not finite in {when} already, in the first it was finite there"


def _not_again(first: Trace, second: Trace, incident: Incident) -> str:
    """What was not finite in the first run only; empty where it is so in the second as well."""
    if incident.site is None or _is_bad_there(second, incident.site, incident.step):
        return ""
    name = "the loss" if incident.kind == "loss" else short(incident.site.fqn)
    when = f"{first.moment(incident.step)} ({incident.phase})"
    return f"in the first run {name} was not finite in {when}, in the second it was finite there"


def unconfirmed(findings: tuple[Finding, ...], second: Trace, why: str) -> tuple[Finding, ...]:
    """The findings of a first run; those that the second does not show as well are no more than likely.

    Args:
        findings: of the first run.
        second: trace of the second.
        why: what the second run did instead, in words.
    """
    again = set(map(_where, analysis_of(second).findings))
    said = f"Only the first run shows this: {why}."
    return tuple(finding if _where(finding) in again else _capped(finding, said) for finding in findings)


def _where(finding: Finding) -> tuple[object, ...]:
    return finding.id, finding.fqn, finding.phase, finding.step


def _capped(finding: Finding, said: str) -> Finding:
    confidence = Confidence.LIKELY if finding.confidence is Confidence.PROVEN else finding.confidence
    return replace(finding, confidence=confidence, proven_by=None, evidence=(*finding.evidence, said))


def _key(raised: Raised | None, first: Trace) -> tuple[object, ...]:
    """What has to be equal of two exceptions; of code that was compiled in the first run only when they were raised."""
    if raised is None:
        return ()
    compiled = any(seen.what.unique_graphs for seen in first.observed(CompileCounts))
    return (raised.step,) if compiled else (raised.step, raised.phase, raised.type, *raised.modules[-1:])


def _raised(raised: Raised | None, trace: Trace) -> str:
    if raised is None:
        return "raises nothing"
    where = f" in {short(raised.modules[-1])}" if raised.modules else ""
    return f"raises {raised.type}{where} {trace.when(raised)}"


def _is_new(first: Trace, early: Incident, *, before: int) -> bool:
    """Whether what the second run had in an earlier step was measured in the first one, and finite: the second has begun elsewhere.

    It has resumed from what the first has saved, say.
    """
    if early.site is None or early.step >= before:
        return False
    found = [sample.finite for sample in _measured_there(first, early.site, early.step)]
    return bool(found) and all(found)


def _is_bad_there(trace: Trace, place: Site, step: int) -> bool:
    """Whether the same place is not finite in the same step."""
    return not all(sample.finite for sample in _measured_there(trace, place, step))


def _measured_there(trace: Trace, place: Site, step: int) -> Iterator[Sample]:
    for sample in trace.samples:
        site = trace.sites[sample.site]
        if sample.step == step and _whereabouts(site) == _whereabouts(place):
            yield sample


def _whereabouts(site: Site) -> tuple[object, ...]:
    return site.kind, site.root, site.fqn, site.phase
