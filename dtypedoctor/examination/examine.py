"""Examines a run that is over: what is found in it, what to do about that and how that was tried, and which call it has left as a capsule.

An edit is shown as a change of the source only after the changed program has shown that it helps: it is run again with its edited files in place of its
own, alone (:mod:`dtypedoctor.runner.view`), for no longer than the failure takes to show. Where that cannot be, what has changed the failing call or
operator as the edit would is its trial. An edit that was not tried, or does not help, is told in words.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from dtypedoctor.analysis import analysis_of, ending_of, said_of_caught, with_caught
from dtypedoctor.diagnosis import preflight, spec_of
from dtypedoctor.diagnosis.checkpoint import Intent, is_checkpoint, read_checkpoint
from dtypedoctor.diagnosis.distributed import across_ranks
from dtypedoctor.diagnosis.edits import MAKERS, NO_MAKER, advise
from dtypedoctor.diagnosis.nonfinite_origin import is_unsettled
from dtypedoctor.diagnosis.rule import SILENT, Advice, Confidence, Edit, Excerpt, Finding, Severity
from dtypedoctor.diagnosis.wording import class_of_named, named_in
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.capsules import caught_in
from dtypedoctor.examination.fixes import ABLATIONS, exec_option, remedy_named
from dtypedoctor.examination.processes import rank_of, ranks_of, said_of_spawned, summarise
from dtypedoctor.examination.results import NOT_REQUESTED, REPLAYED, Observer, Outcome, Treatment, Trial, not_tried
from dtypedoctor.foreign_files import read_file
from dtypedoctor.plugins import Remedy
from dtypedoctor.replay.capsule import CallFix, Capsule, NoCapsule
from dtypedoctor.rules.nonfinite.undefined import GROWN
from dtypedoctor.runner.run import Run
from dtypedoctor.text import counted
from dtypedoctor.trace.events import AFTER_STEP, REPLAY_OF_FAILURES, Coverage, NotWatched
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import EAGER, ReplayedCall
from dtypedoctor.trace.records.silent import RoundedUse

MOST_TRIALS = 12
"""Runs with an edit, at most."""
PARTS = 4
"""Lines of an edit that are tried one by one, once all of them together help."""
SECONDS = 60.0
"""Time for all runs with edits together, and the longest first run after which there are any; twice as long as that, and a little more, is enough for most."""
SECONDS_FOR_NOTE = 5.0
"""Longest run of a healthy program that is repeated for the edit of a note."""
_LARGEST_FILE = 4 << 20
ROUNDING = 2**-4
"""How far a loss may be from that of the program as it is where that is right: half precision keeps 8 bits or more, and a deep network loses some."""
_ABSURD = 1000.0
"""How many times larger than the losses before it a loss is that is finite and wrong: a bound in the place of an inf."""
_END = 8
"""The last loss of a training is the median of its last eighth."""
_AFTER_THE_LOSS = frozenset({"backward", "optimizer", AFTER_STEP})

ROUNDED_RESULT = "rounded-result"

Attempt = Callable[[str, dict[str, str], int], Run | str]
"""Runs the program with other text in some of its files, under a label, for so many seconds; gives the run, or why there is none."""


@dataclass(slots=True)
class EditTrials:
    """What shows whether an edit helps.

    Attributes:
        before: the run of the program as it is.
        capsule: the failing call, on which fixes were tried.
        trials: runs that were made with a fix.
        attempt: None where the program cannot be run again.
        made: edited runs so far.
        spent: seconds that they have taken.
        why_not: why the program is not run again, where it is not.
        shown: what the last of them has shown, as a sentence.
        moved: whether it failed, and otherwise than the program as it is.
        partial: the first advice after which only other findings are left that the program as it is has, too; None where there is none.
    """

    before: Run
    capsule: Capsule | NoCapsule | None = None
    trials: Sequence[Trial] = ()
    attempt: Attempt | None = None
    made: int = 0
    spent: float = 0.0
    why_not: str = "the program is not run again from here"
    shown: str = ""
    moved: bool = False
    partial: Advice | None = None

    def judged(self, finding: Finding, advice: Advice) -> Advice:
        """The advice: its edits with how they were tried, or without edits, in words, with the reason."""
        if not advice.edits:
            return advice
        if finding.severity is Severity.INFO and self.before.exit.seconds > SECONDS_FOR_NOTE:
            return replace(advice, edits=())
        how, verdict = self._run(finding, advice.edits)
        if how is None:
            called, why_not = self._call(finding, advice.maker)
            how, verdict = (called, why_not) if called is not None else (None, verdict)
        places = ", ".join(dict.fromkeys(f"{edit.file}:{edit.line}" for edit in advice.edits[:3]))
        if how is None:
            return replace(advice, text=f"{advice.text} Not tried at {places}: {verdict}.", edits=(), waits=True)
        if verdict:
            if isinstance(verdict, _Left) and self.partial is None:
                self.partial = replace(advice, text=f"{advice.text}{self.shown} {verdict}.", tried=how)
            text = f"Tried {_WHERE[how]} ({places}), where it does not help: {verdict}."
            return replace(advice, text=text, edits=(), tried=how, waits=self.moved)
        if how == "call":
            return replace(advice, text=advice.text + _ON_THE_CALL, tried=how)
        smallest = self._part(finding, advice)
        return replace(smallest, text=smallest.text + self.shown, tried=how)

    def _part(self, finding: Finding, advice: Advice) -> Advice:
        """The advice with one line of an edit that passed, where this passes alone; else as it is, and where it has lines that name what others use."""
        shown, has_more_lines = self.shown, any("\n" in edit.new for edit in advice.edits)
        for edit in advice.edits if 1 < len(advice.edits) <= PARTS and not has_more_lines else ():
            if self._run(finding, (edit,)) == ("run", ""):
                return replace(advice, edits=(edit,), text=advice.of_a_part or advice.text)
        self.shown = shown
        return advice

    def _run(self, finding: Finding, edits: Sequence[Edit]) -> tuple[str | None, str]:
        """``run`` and what speaks against the edit, empty where nothing does; or None, and why the edited program was not run."""
        if self.attempt is None:
            return None, self.why_not
        if self.before.exit.seconds > SECONDS:
            return None, f"an instrumented run takes {self.before.exit.seconds:.0f} s, and edits get {SECONDS:.0f} s"
        if self.made >= MOST_TRIALS or self.spent >= SECONDS:
            return None, f"{self.made} others were tried before it"
        try:
            files = edited_files(edits)
        except (OSError, ValueError):
            return None, "the file is not there as it was"
        self.made += 1
        seconds = math.ceil(min(SECONDS - self.spent, 2 * self.before.exit.seconds + 20))
        run = self.attempt(f"edit-{self.made}", files, seconds)
        if isinstance(run, str):
            return None, run
        self.spent += run.exit.seconds
        if run.exit.asked_to_end:
            self.attempt = None
            return None, "its run was interrupted"
        steps = counted(run.trace.steps_done, "step")
        self.shown = f" Tried: {steps if run.trace.steps_done else 'the program runs'} without the failure."
        if run.exit.timed_out and run.trace.steps_done <= max(finding.step or 0, self.before.trace.steps_done):
            return None, f"in {seconds} s the program does not come to where it fails"
        self.moved = all(left.id != finding.id or left.source != finding.source for left in findings_of(run))
        objections = [one for process in run.processes for one in _objections(finding, self.before, process)]
        changed = changed_loss(finding, self.before, run)
        if changed and not objections and self._repeats(finding, files, seconds):
            objections.append(changed)
        objections.sort(key=lambda one: isinstance(one, _Left))
        return "run", next(iter(objections), "")

    def _repeats(self, finding: Finding, files: Mapping[str, str], seconds: int) -> bool:
        """Whether another run of the program as it is has the same first loss: where nothing seeds its random numbers, an edit does not change it."""
        assert self.attempt is not None
        run = self.attempt(
            f"as-it-is-{self.made}", {path: read_file(Path(path), _LARGEST_FILE).decode() for path in files}, seconds
        )
        return isinstance(run, str) or not changed_loss(finding, self.before, run)

    def _call(self, finding: Finding, maker: str) -> tuple[str | None, str]:
        """How what the edit does was tried without it (None: not at all), and why it does not help."""
        made_by = MAKERS.get(maker, NO_MAKER)
        fix = made_by.tried_as
        for trial in filter(_was_tried, self.trials):
            if trial.remedy == fix:
                return "run", _why_not(trial)
        for row in self.capsule.fixes if isinstance(self.capsule, Capsule) else ():
            # What raises has met a dtype that stands in the module's own code, where the edit would change it
            if row.fix == fix and _was_tried(row) and not row.reason.startswith("raises "):
                return "call", _why_not(row)

        # The operator alone was made again with what the edit does: that is what proves the finding
        is_proven = made_by.on_operator and finding.proven_by is not None
        return ("call" if is_proven else None), ""


def _was_tried(trial: Trial | CallFix) -> bool:
    return trial.outcome != Outcome.NOT_TRIED


def _why_not(tried: Trial | CallFix) -> str:
    """Why a fix that was tried does not help; empty where it does."""
    return "" if tried.outcome == Outcome.FIXED else tried.reason


_ON_THE_CALL = " Tried on the failing call only."
_WHERE = {"call": "on the failing call", "run": "in a run"}


_LATER = "run the program with the edit above first"


def judge_edits(findings: Sequence[Finding], advice: Sequence[Advice], trials: EditTrials) -> tuple[Advice, ...]:
    """The advice on each finding, with edits only where they were tried and help: of several ways the first that does.

    After the first edit that helps, the others wait: what is left to mend shows when the program runs with it.
    """
    judged: list[Advice] = []
    for finding, first in zip(findings, advice, strict=True):
        ways: list[Advice] = []
        trials = replace(trials, partial=None)
        for way in (first, *first.others):
            ways.append(trials.judged(finding, replace(way, others=())))
            if ways[-1].edits:
                break
        if trials.partial is not None and not ways[-1].edits:
            ways.append(trials.partial)
        if ways[-1].edits:
            trials = replace(trials, attempt=None, why_not=_LATER)
        trials = replace(trials, capsule=None)  # the call of the capsule fails as the first finding says
        judged.append(ways[-1] if ways[-1].edits else _in_words(finding, ways))
    return tuple(judged)


def _in_words(finding: Finding, ways: Sequence[Advice]) -> Advice:
    """The advice where no way has shown that it helps: the first that was not tried; where all were and fail, what each has shown."""
    untried = next((way for way in ways if way.tried is None), None)
    if untried is not None:
        return replace(untried, waits=any(way.waits for way in ways))
    shown = dict.fromkeys(way.text for way in ways)
    text = f"No edit helps by itself. {' '.join(shown)} `dtypedoctor explain {finding.id}` names other ways."
    return replace(ways[0], text=text, waits=any(way.waits for way in ways))


def edited_files(edits: Sequence[Edit]) -> dict[str, str]:
    """The files that edits change, by path, as they are after them.

    Raises:
        OSError: one cannot be read.
        ValueError: one has other lines than the edits say.
    """
    files: dict[str, list[str]] = {}
    for edit in edits:
        path = str(Path(edit.file).resolve())
        if path not in files:
            data = read_file(Path(path), _LARGEST_FILE)
            files[path] = [line.decode() for line in data.splitlines(keepends=True)]
        if [line.rstrip("\r\n") for line in files[path][edit.line - 1 : edit.line]] != [edit.old]:
            raise ValueError(f"{edit.file}:{edit.line} has changed")
    for edit in edits:
        lines = files[str(Path(edit.file).resolve())]
        end = lines[edit.line - 1][len(edit.old) :] or "\n"
        lines[edit.line - 1] = edit.new.replace("\n", end) + end if edit.new else ""
    return {path: "".join(lines) for path, lines in files.items()}


def _objections(finding: Finding, before: Run, run: Run) -> Iterator[str]:
    """What speaks against an edit after the run with it, the plainest first."""
    ending = ending_of(run)
    if ending.raised is not None or (run.died and not run.exit.timed_out):
        yield ending.words

    known = analysis_of(before.trace).findings
    yield from _remaining(finding, known, run)
    if all(old.id != ROUNDED_RESULT for old in known):
        yield from _rounded_losses(run)
    yield from insane_losses(finding, before, run)
    yield from _steps_left_out(before, run)


class _Left(str):
    """That another finding is left which was there before: it has an advice of its own."""

    __slots__ = ()


def _remaining(finding: Finding, known: Sequence[Finding], run: Run) -> Iterator[str]:
    """The finding again, unless it is a note now, and what was not there before: errors, and dtypes or a scaler that do not fit each other, which an edit of a part leaves."""
    milder = {Severity.INFO} - {finding.severity}
    for left in analysis_of(run.trace).findings:
        if left.id == finding.id and left.severity not in milder and not _is_finer(left, finding):
            yield _again(left, finding, known)
        elif all(old.id != left.id for old in known) and (left.severity is Severity.ERROR or _is_left_half_done(left)):
            yield f"{left.id} occurs"


def _again(left: Finding, finding: Finding, known: Sequence[Finding]) -> str:
    """That a finding is there again, or that another of its kind is left."""
    is_silent = spec_of(left.id).family is SILENT and left.source != finding.source
    if is_silent and any((old.id, old.source) == (left.id, left.source) for old in known):
        return _Left(f"{left.id} at {left.source} is left")
    return f"{left.id} recurs"


def _is_finer(left: Finding, finding: Finding) -> bool:
    """Whether a finding is of another line that a wider dtype rounds: it was there before, below what is mended."""
    left_dtype, dtype = DTYPES.get(left.dtype or ""), DTYPES.get(finding.dtype or "")
    is_wider = left_dtype is not None and dtype is not None and left_dtype.epsilon < dtype.epsilon
    return is_wider and left.source != finding.source and spec_of(finding.id).family is SILENT


def _is_left_half_done(finding: Finding) -> bool:
    return finding.severity is Severity.WARNING and spec_of(finding.id).family is not SILENT


def _rounded_losses(run: Run) -> Iterator[str]:
    """Losses that are finite now, and others than the same operators give in float64."""
    told = {finding.source for finding in analysis_of(run.trace).findings if finding.id == ROUNDED_RESULT}
    for seen in run.trace.observed(RoundedUse):
        if seen.what.use == "loss" and (seen.what.made_at or seen.what.source) in told:
            yield f"the loss is {seen.what.value} then, and {seen.what.exact} in float64"


def insane_losses(finding: Finding, before: Run, run: Run) -> Iterator[str]:
    """What is wrong with the losses of a run in which an edit was to make values finite: it must not make others of those that were."""
    if not spec_of(finding.id).nonfinite:
        return
    was, losses = _sizes_of_losses(before.trace), _sizes_of_losses(run.trace)
    worst = max(losses, default=0.0)
    if not math.isfinite(worst):
        yield "the loss is not finite"
        return
    usual = max(filter(math.isfinite, was), default=1.0)
    # What float16 cannot hold may be that large. What float32 could not hold is bounded now.
    if finding.dtype != "float16" and worst > _ABSURD * max(usual, 1.0):
        yield f"the loss is {worst:.3g} then"
    # What is wrong with a training that was ended before its losses were infinite; one that is large once says nothing
    losses = list(map(abs, run.trace.losses.values()))
    last = median(losses[-max(1, len(losses) // _END) :]) if losses else 0.0
    if losses and last >= GROWN * max(losses[0], 1.0):
        yield f"the loss still grows, from {losses[0]:.3g} to {last:.3g}"


def _steps_left_out(before: Run, run: Run) -> Iterator[str]:
    """What an edit costs that leaves out a batch of several that one step of the optimizer is made of."""
    ended = [of for of in (before, run) if of.trace.end is not None and not of.exit.timed_out]
    steps = [of.trace.steps_done for of in ended]
    if len(ended) == 2 and 0 < steps[1] < steps[0] and _losses_counted(before.trace) >= 2 * steps[0]:
        yield f"{steps[0] - steps[1]} of {steps[0]} steps of the optimizer are left out, with batches that have gone into them"


def _losses_counted(trace: Trace) -> int:
    counted = trace.last(Coverage)
    return counted.losses if counted is not None else 0


def _sizes_of_losses(trace: Trace) -> list[float]:
    """The magnitudes of the losses: those of steps, and those that were measured, which a program without an optimizer has too."""
    measured = [
        sample.absmax if sample.finite else math.inf for sample, site in trace.measured() if site.kind == "loss"
    ]
    return measured + [abs(loss) if math.isfinite(loss) else math.inf for loss in trace.losses.values()]


def changed_loss(finding: Finding, before: Run, run: Run) -> str:
    """How the first loss differs, as a clause: computed with the weights that the program begins with, it is the same in both runs where it was right."""
    was, losses = before.trace.losses, run.trace.losses
    begin = min(was.keys() & losses.keys(), default=0)
    is_right = begin and begin < (finding.step or 1) + (finding.phase in _AFTER_THE_LOSS) and math.isfinite(was[begin])
    if not is_right or spec_of(finding.id).family is SILENT:
        return ""
    usual = max(abs(loss) for loss in was.values() if math.isfinite(loss))
    rounding = ROUNDING * max(abs(losses[begin]), abs(was[begin])) + ROUNDING**4 * usual
    if abs(losses[begin] - was[begin]) <= rounding:
        return ""
    return f"it changes the loss of step {begin}, which is right, from {was[begin]:.4g} to {losses[begin]:.4g}"


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
    program = ran["steps"][0]["workload"]
    advice, excerpts = advised(findings, run, program.get("path"), own_files=own_files)
    advice = judge_edits(findings, advice, EditTrials(run, capsule, attempt=attempt))
    may_be_edited = rerun == "--rerun" and "code" not in program and program.get("path") != "-"
    if advice and advice[0].edits and advice[0].tried:
        asked = ""  # what another run would tell is known
    else:
        asked = _FIX if may_be_edited and advice and advice[0].waits else rerun_advice(findings, trials, rerun)
    return Treatment(
        name=str(ran["name"]),
        scenario=ran,
        before=run,
        before_summary=summarise("before", run, sum(step["workload"].get("steps", 0) for step in ran["steps"])),
        no_op_trace=look.why_none if rerun or (capsule_limit is not None and look.why_none) else WATCHED_LIVE,
        replayed=look.certificate,
        capsule=capsule,
        findings=findings,
        advice=advice,
        excerpts=excerpts,
        observer=NOT_COMPARED if rerun else Observer(bitwise_equal=None, reason=WATCHED_LIVE),
        reference=None,
        reference_summary=None,
        trials=trials,
        complete=False,
        rerun=asked if rerun else "",
    )


_FIX = "--fix: it tries edits in a copy of the program, however long that takes"


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
    begun = f"{REPLAYED}{_number_of(seen)} replayed in the process itself, {_moment_of(seen)}"
    doubt = next((what.doubt for what in seen if what.doubt), "")
    if doubt:
        return Look(certificate=f"{begun}; the replay differed: {doubt}.", differs=doubt)
    uncompiled = [what for what in seen if what.why == EAGER]
    if uncompiled:
        begun = f"{begun}, {_number_of(uncompiled)} in eager mode, where the results are finite"
    comparable = len(seen) - len(uncompiled)
    return Look(certificate=f"{begun}; {_equality(seen, comparable)}." if comparable else f"{begun}.")


def _equality(seen: Sequence[ReplayedCall], comparable: int) -> str:
    """How like their calls those replays are that can be compared, as a clause."""
    equal = sum(what.compared for what in seen)
    which = "the results are" if equal == comparable else f"{equal} of {comparable} results could be compared, and are"
    rounds = any(what.rounds for what in seen)
    return (
        f"{which} {'the same but for rounding, as compiled code and eager mode differ' if rounds else 'bitwise equal'}"
    )


_RAISED = ("raised", "backward raised")


def _number_of(replays: Sequence[ReplayedCall]) -> str:
    steps = sum(replay.why == "optimizer" for replay in replays)
    calls = len(replays) - steps
    failed = "failed " if any(replay.why in _RAISED for replay in replays) else ""
    parts = [f"{calls} {failed}call{'s' if calls > 1 else ''}"] if calls else []
    return " and ".join([*parts, *(["1 optimizer step"] if steps else [])])


def _moment_of(replays: Sequence[ReplayedCall]) -> str:
    """When calls were made again, and with which parameters, as a clause."""
    if any(replay.late for replay in replays):
        return "after its parameters had been updated"
    if any(replay.copies for replay in replays):
        return "once the failure was known, with copies of the parameters"
    if all(replay.why == "packed" for replay in replays):
        return "after the call"
    is_failure = any(replay.why in _RAISED for replay in replays)  # inf that is seen may be meant
    return "at the moment of the failure" if is_failure else "at the moment it was seen"
