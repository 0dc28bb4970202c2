"""Looks at a failure with the op trace on: in a replay of the part of the run that failed, or in another run of the scenario."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtypedoctor.analysis import How, analysis_of, ending_of
from dtypedoctor.diagnosis.incidents import Incident
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.window import eager_window, shows_failure, suspicious_windows
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file, write_file
from dtypedoctor.runner.process import ending_by_interrupt
from dtypedoctor.runner.run import Run, open_run
from dtypedoctor.scenario.model import Request, Scenario, Window
from dtypedoctor.trace.events import REPLAY_OF_FAILURES, NotWatched, Raised, Sample, Site
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import EAGER, CompileCounts, ReplayedCall
from dtypedoctor.trials.remedies import is_script
from dtypedoctor.trials.replays import LONGEST, Replays, replay_of
from dtypedoctor.trials.runs import LaterRuns, was_asked_to_end
from dtypedoctor.unpatched import to_json
from dtypedoctor.values import dataclass

__all__ = ["CloserLook", "another_way", "keep_look", "kept_look", "look_closer", "replayed", "unconfirmed"]


MAX_LOOKS = 2
"""Runs with the op trace on; each costs about as much as the first run."""
NOT_REPEATED = "a run that was stopped is not repeated"
NOTHING_POINTED = "not needed"
STOPPED = "the second run was stopped before its end"
NOT_MADE = "the second run could not be made"
NOT_SEEN_AGAIN = "the failure did not come back in a second run, so no op trace shows it"
NOT_RECURRED = "the failure did not recur"
NOT_REPLAYED = "nothing could be replayed: {}"
NOT_IN_REPLAY = "the failure did not come back in the replay"
MAY_PROVE = "{}; another run may prove the finding"
OTHER_REPLAY = "the replay went another way: {}"
INTERRUPTED = "the replay was interrupted"
SECONDS_AFTER_SIGNAL = 20.0
"""How long a replay may take after a signal to end: a batch system kills half a minute later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloserLook:
    """What came of looking at a failure with the op trace on.

    Attributes:
        before: the first run.
        closer: the second, where it shows the same failure with the op trace on.
        no_closer: why there is none, where there is none.
        other: a second run that shows something else.
        doubt: what that run did instead, in words.
        certificate: of a replay, how it was compared with the run, as a sentence.
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


LOOK = "look.json"
"""In the directory of a replay: how it compared with the run."""


def keep_look(look: CloserLook) -> None:
    """Writes down beside a replay how it compared with the run, for who joins what several machines have recorded."""
    if look.closer is None or not look.certificate:
        return
    told = {"of": look.before.directory.name, "certificate": look.certificate, "differs": look.differs}
    with contextlib.suppress(OSError):  # it is told in this run's report all the same
        write_file(look.closer.directory / LOOK, to_json(told))


def kept_look(run: Run) -> CloserLook:
    """The replay of a finished run that was made when it ended, on its machine; else what the run itself shows."""
    for path in sorted(run.directory.parent.glob(f"closer*/{LOOK}")):
        try:
            told = parse_json(read_file(path))
            if told["of"] == run.directory.name:
                made = replace(open_run(path.parent).run, foreign=run.trace.by_call)
                return CloserLook(
                    before=run,
                    closer=replay_of(run, made),
                    certificate=str(told["certificate"]),
                    differs=str(told["differs"]),
                )
        except (OSError, ValueError, TypeError, KeyError, UsageError):  # as good as none
            continue
    return _replayed_in_place(run) if run.trace.observed(ReplayedCall) else CloserLook(before=run)


def look_closer(scenario: Scenario, before: Run, later: LaterRuns, *, may_rerun: bool) -> CloserLook:
    """The failure with the op trace on, or why there is no such look at it.

    A script has left forks from which the part that failed is replayed. It is run again only where they do not explain the failure.

    Args:
        scenario: what was run.
        before: the run.
        later: runs it again.
        may_rerun: whether it may be run again.
    """
    if not is_script(scenario):
        return _run_again(scenario, before, later, "closer") if may_rerun else CloserLook(before=before)
    look = _replayed_unless_interrupted(scenario, before, later)
    if not look.rerun_tells or not may_rerun or _was_stopped(before):
        return look
    again = _run_again(scenario, before, later, "rerun")
    differs = NOT_RECURRED if again.no_closer == NOT_SEEN_AGAIN else again.doubt
    return replace(look if again.closer is None and look.closer is not None else again, rerun_differs=differs)


def _replayed_unless_interrupted(scenario: Scenario, before: Run, later: LaterRuns) -> CloserLook:
    """A replay takes as long as the run did, or longer; who asks for the end meanwhile gets the report of the run."""
    try:
        with ending_by_interrupt():
            return replayed(scenario, before, SECONDS_AFTER_SIGNAL if was_asked_to_end(before) else LONGEST)
    except KeyboardInterrupt:
        later.end()
        return _untold(CloserLook(before=before), INTERRUPTED)


def _run_again(scenario: Scenario, before: Run, later: LaterRuns, label: str) -> CloserLook:
    if _was_stopped(before):
        return CloserLook(before=before, no_closer=NOT_REPEATED)
    look = _looked(scenario, before, later, label)
    doubt = another_way(before, look.closer) if look.closer is not None else ""
    return _doubted(look, f"a second run went another way: {doubt}", doubt) if doubt else look


def replayed(scenario: Scenario, before: Run, longest: float = LONGEST) -> CloserLook:
    """The failing part of a run again with the op trace on, from a process that stood by before it, or why there is none.

    Args:
        scenario: what was run.
        before: the run.
        longest: seconds that it may take.
    """
    replays = Replays(before, longest)
    look = _looked(scenario, before, replays, "closer")
    if look.closer is None and look.other is None and before.trace.observed(ReplayedCall):
        return _replayed_in_place(before)
    if look.closer is None:
        return _without_replay(look, replays.why_not and (_why_not_in_place(before) or replays.why_not))
    certificate = replays.certificate(look.closer)
    ended = look.closer.trace.end is not None  # else it was over long after what it was made for
    doubt = (another_way(before, look.closer) if ended else "") or certificate.doubt
    if doubt:
        why = OTHER_REPLAY.format(doubt)
        return _untold(_doubted(look, why, doubt), why)
    told = MAY_PROVE.format(certificate.differs) if certificate.differs else ""
    return replace(look, certificate=certificate.words, differs=certificate.differs, rerun_tells=told)


def _without_replay(look: CloserLook, why_not: str) -> CloserLook:
    """There is no replay, for the reason ``why_not`` if there is one, or it does not show the failure."""
    if why_not:  # a replay that ended before the failure is no second run in which that did not come back
        return _untold(replace(look, doubt=why_not), NOT_REPLAYED.format(why_not))
    if look.other is not None:
        return _untold(replace(look, doubt=NOT_IN_REPLAY), NOT_IN_REPLAY)
    return look


def _untold(look: CloserLook, why: str) -> CloserLook:
    """``look`` at a failure that no replay explains, for the reason ``why``."""
    return replace(look, no_closer=why, rerun_tells=f"{why}; another run can record the operator that failed")


def _replayed_in_place(before: Run) -> CloserLook:
    """The op trace that the run itself has left, of calls that it made again; where one of these went differently, what is seen without it."""
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


def _looked(scenario: Scenario, before: Run, later: LaterRuns | Replays, label: str) -> CloserLook:
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


def _not_seen_again(
    scenario: Scenario, before: Run, later: LaterRuns | Replays, label: str, *, may_look: bool
) -> CloserLook:
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
    return f"raises {raised.type}{where} in {trace.moment(raised.step)} ({raised.phase})"


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
