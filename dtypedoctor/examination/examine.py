"""Examines a run that is over: what is found in it, what to do about that and how that was tried, and which call it has left as a capsule."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dtypedoctor.analysis import analysis_of, said_of_caught, with_caught
from dtypedoctor.diagnosis import preflight
from dtypedoctor.diagnosis.advice import advise
from dtypedoctor.diagnosis.checkpoint import Intent, is_checkpoint, read_checkpoint
from dtypedoctor.diagnosis.distributed import across_ranks
from dtypedoctor.diagnosis.rule import Advice, Confidence, Excerpt, Finding, Severity
from dtypedoctor.diagnosis.unsettled import is_unsettled
from dtypedoctor.diagnosis.wording import class_of_named, named_in
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.capsules import caught_in
from dtypedoctor.examination.fixes import ABLATIONS, exec_option, remedy_named
from dtypedoctor.examination.processes import rank_of, ranks_of, said_of_spawned, summarise
from dtypedoctor.examination.results import NOT_REQUESTED, Observer, Outcome, Treatment, Trial, not_tried
from dtypedoctor.examination.tried_edits import Attempt, EditTrials, judge_edits
from dtypedoctor.plugins import Remedy
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import REPLAY_OF_FAILURES, NotWatched
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import EAGER, ReplayedCall

WATCHED_LIVE = "the program was instrumented while it ran and is not run again from here (of a script, `dtypedoctor exec` does that; in a notebook, run it again with the edit or with dtypedoctor.apply)"
NOT_COMPARED = Observer(bitwise_equal=None, reason="the script was not run without instrumentation; --rerun does that")


def examine(
    ran: Mapping[str, Any],
    run: Run,
    *,
    static: tuple[Finding, ...] = (),
    capsule_limit: int | None = None,
    rerun: str = "",
    own_files: bool = True,
    attempt: Attempt | None = None,
) -> Treatment:
    """Diagnoses a run that is over.

    Args:
        ran: what was run, as report.json has it.
        run: what was watched of it.
        static: what was found in its checkpoints before it began.
        capsule_limit: bytes that the capsule of the failing call may take; without it none is kept.
        rerun: how ``exec`` is asked to run it again; empty where it cannot be from here.
        own_files: whether the program's source may be read: not where the trace is somebody else's, who could name any file in it.
        attempt: runs the program with an edit; None where it is not run again.
    """
    run = with_caught(run)
    look = look_of(run)
    found = findings_of(run, static)
    capsule = caught_in(run, found, capsule_limit) if capsule_limit is not None else None
    findings = look.cap_confidence(found)
    fixes = proposed(findings, ran.get("remedies", ()), run.trace)
    trials = tuple(
        not_tried(fix, untried(fix) if rerun else WATCHED_LIVE, condition=bool(rerun) and is_ablation(fix))
        for fix in fixes
    )
    advice, excerpts = advised(findings, run, ran["steps"][0]["workload"].get("path"), own_files=own_files)
    return Treatment(
        name=str(ran["name"]),
        scenario=ran,
        before=run,
        before_summary=summarise("before", run, sum(step["workload"].get("steps", 0) for step in ran["steps"])),
        no_op_trace=look.why_none if rerun or (capsule_limit is not None and look.why_none) else WATCHED_LIVE,
        replayed=look.certificate,
        capsule=capsule,
        findings=findings,
        advice=judge_edits(findings, advice, EditTrials(run, capsule, attempt=attempt)),
        excerpts=excerpts,
        observer=NOT_COMPARED if rerun else Observer(bitwise_equal=None, reason=WATCHED_LIVE),
        reference=None,
        reference_summary=None,
        trials=trials,
        complete=False,
        rerun=rerun_advice(findings, trials, rerun) if rerun else "",
    )


def findings_of(run: Run, static: tuple[Finding, ...] = ()) -> tuple[Finding, ...]:
    """What is found in all processes of ``run``, and what was found in its checkpoints before it."""
    findings = joined(said_of_caught(analysis_of(run.trace).findings, run.trace), static)
    return said_of_spawned(across_ranks(findings, ranks_of(run), rank_of(run)), run)


def joined(dynamic: tuple[Finding, ...], static: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """What a run showed, then what its files showed beforehand; what both showed is said once."""
    known = {finding.id for finding in dynamic}
    extra = tuple(finding for finding in static if finding.id not in known)
    errors = tuple(finding for finding in dynamic if finding.severity is Severity.ERROR)
    return (*errors, *extra, *(finding for finding in dynamic if finding.severity is not Severity.ERROR))


def checkpoints_among(arguments: Sequence[str]) -> Iterator[tuple[Path, Intent]]:
    """The local folders among the arguments of a program, or names of models, that are checkpoints."""
    for argument in arguments:
        path = Path(argument.partition("=")[2] or argument)
        with suppress(OSError, ValueError):  # an argument that is no path at all
            if path.is_dir() and is_checkpoint(path):
                yield path, Intent()


def stand_out(checkpoints: Iterable[tuple[Path, Intent]]) -> tuple[Finding, ...]:
    """What stands out in checkpoints that are about to be loaded. Mere information is left out: it says nothing about a run."""
    findings: list[Finding] = []
    for path, intent in dict(checkpoints).items():
        with suppress(UsageError):  # a folder that cannot be read is left to the run to complain of
            findings += preflight(read_checkpoint(path, intent))
    return tuple(finding for finding in findings if finding.severity is not Severity.INFO)


def advised(
    findings: tuple[Finding, ...], run: Run, script: str | None, *, own_files: bool = True
) -> tuple[tuple[Advice, ...], tuple[Excerpt, ...]]:
    """Say what to do about findings: whatever a report shows of the program's files is read here."""
    named, header = [named_in(run.trace, finding) for finding in findings], run.trace.header
    return advise(named, run.trace, script, began=header.created if header is not None else 0.0, own_files=own_files)


def proposed(findings: Sequence[Finding], asked_for: Sequence[str], trace: Trace | None) -> Iterator[Remedy]:
    """What the findings propose, then what was asked for; each once. ``trace`` is that of the run, where it failed."""
    wanted = [remedy for finding in findings if finding.severity is not Severity.INFO for remedy in finding.remedies]
    for name in dict.fromkeys([*wanted, *asked_for]):
        if remedy := remedy_named(name, partial(class_of_named, trace)):
            yield remedy


def is_ablation(remedy: Remedy) -> bool:
    """Whether a fix takes away a condition of the process, and so tells whether the failure requires that."""
    return remedy.id in ABLATIONS.values()


def untried(remedy: Remedy) -> str:
    """Why a fix of a script was not tried in a run of its own: nobody has asked for one, or it takes an edit."""
    if not remedy.in_scripts:
        return f"needs an edit in your script: {remedy.by_hand or remedy.summary}"
    option, value = exec_option(remedy.id)
    told = "without it and shows whether the failure requires it" if is_ablation(remedy) else "with it"
    return f"{NOT_REQUESTED}: {option} {value} runs the script again {told}"


def rerun_advice(findings: tuple[Finding, ...], trials: tuple[Trial, ...], option: str) -> str:
    """The options with which another run would tell more, and what it would tell; empty where it would tell nothing."""
    if any(trial.outcome is Outcome.FIXED for trial in trials):
        return ""
    unasked: dict[str, list[str]] = {"--try": [], "--ablate": []}
    for trial in trials:
        if trial.reason.startswith(NOT_REQUESTED):
            name, value = exec_option(trial.remedy)
            unasked[name].append(value)
    fixes, ablations = unasked.values()
    if fixes:
        return f"{option} --try {fixes[0]}: it shows whether {fixes[0]} fixes the failure"
    if ablations and findings[0].confidence is not Confidence.PROVEN:
        return f"{option}: runs without {' and '.join(ablations)} show whether the failure requires it"
    return ""


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
