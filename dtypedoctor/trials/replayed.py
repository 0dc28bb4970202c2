"""What a run has left of calls that it has made again itself, where they failed, with the op trace on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.unsettled import is_unsettled
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import REPLAY_OF_FAILURES, NotWatched
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import EAGER, ReplayedCall

NOTHING_POINTED = "not needed"
NO_CALL = "what failed is no module call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What came of making calls again.

    Attributes:
        certificate: how the calls were compared with the run, as a sentence; empty where none was made again.
        differs: how the bits of a replay differ from those of the run, as a clause.
        why_none: why there is no op trace, where there is none.
    """

    certificate: str = ""
    differs: str = ""
    why_none: str = ""

    def cap_confidence(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings; where a replay went differently, none is called proven."""
        if not self.differs:
            return findings
        said = f"It was explained by a replay that is not bitwise identical: {self.differs}."
        return tuple(
            replace(
                finding,
                confidence=Confidence.LIKELY if finding.confidence is Confidence.PROVEN else finding.confidence,
                proven_by=None,
                evidence=(*finding.evidence, said),
            )
            for finding in findings
        )


def look_of(run: Run) -> Look:
    """The look at what failed in ``run``, or why there is none."""
    seen = [record.what for record in run.trace.observed(ReplayedCall)]
    if seen:
        return _compared(seen)
    if not is_unsettled(run.trace) or _explains_what_it_raised(run.trace):
        return Look(why_none=NOTHING_POINTED)
    said = (note.why for note in run.trace.all(NotWatched) if note.what == REPLAY_OF_FAILURES)
    return Look(why_none=f"nothing could be replayed: {next(said, NO_CALL)}")


def _explains_what_it_raised(trace: Trace) -> bool:
    """Whether a run knows why it has raised, outside of module calls: the operator was seen there, and tried with other dtypes."""
    analysis = analysis_of(trace)
    first = next(iter(analysis.findings), None)
    return analysis.uncaught is not None and first is not None and first.confidence is Confidence.PROVEN


def _compared(seen: Sequence[ReplayedCall]) -> Look:
    """What the replays are worth: whether they went as the calls did."""
    begun = f"Op trace: {_number_of(seen)} replayed in the process itself, {_moment_of(seen)}"
    doubt = next((what.doubt for what in seen if what.doubt), "")
    if doubt:
        return Look(certificate=f"{begun}; the replay differed: {doubt}.", differs=doubt)
    uncompiled = [what for what in seen if what.why == EAGER]
    if uncompiled:
        begun = f"{begun}, {_number_of(uncompiled)} in eager mode, where the results are finite"
    equal, comparable = sum(what.compared for what in seen), len(seen) - len(uncompiled)
    if not comparable:
        return Look(certificate=f"{begun}.")
    compared = (
        "the results are" if equal == comparable else f"{equal} of {comparable} results could be compared, and are"
    )
    return Look(certificate=f"{begun}; {compared} bitwise equal.")


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
