"""Fixes in words: what each changes, what came of it on the run and on the failing call, and which to prefer; and the runs with them beside the baseline,
one column per run, one row per quantity. Last, one fix by itself: where it can be put in, whether it fits a library's source, a patch to propose."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.diagnosis.wording import short
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.fixes import remedies, remedy_named
from dtypedoctor.examination.results import WRONG_OUTPUT, Bearing
from dtypedoctor.plugins import KEEP_FLOAT32, Correction, registered
from dtypedoctor.report.document import (
    Block,
    Check,
    Fold,
    Heading,
    Items,
    Line,
    Look,
    Paragraph,
    Section,
    Table,
    Words,
    named,
)
from dtypedoctor.report.document import Outcome as Gate
from dtypedoctor.report.to_json import Outcome, Parity, Report, RunSummary, Status, Trial
from dtypedoctor.source_edits import AlreadyCorrectedError, TargetMismatchError, file_of, files_of, patched, release_of
from dtypedoctor.text import ABSENT, count, counted, duration, memory, number, one_line, ratio, span

if TYPE_CHECKING:
    from dtypedoctor.examination.fixes import Reach


_WORDS = {Outcome.FIXED: "fixed", Outcome.NOT_FIXED: "not fixed", Outcome.NOT_TRIED: "not tried"}
_WORDS_HERE = {outcome.value: words for outcome, words in _WORDS.items()} | {"fixed": "fixed on this call"}
_BEARINGS = {
    None: "passes, as does the baseline",
    Bearing.NEEDED: "passes",
    Bearing.NOT_NEEDED: "fails the same way",
    Bearing.MOVED: "fails elsewhere",
}
"""The outcomes of an ablation, which is not a fix."""
_MARK = " Unsafe."
DIAGNOSTIC = " Diagnostic only, not a fix."
_UNSAFE = "Unsafe: it may hide the failure instead of fixing it."
_FIXED_HERE = "Fixed on this call: it alone was made again. Whether it fixes the whole script: `dtypedoctor exec --try FIX SCRIPT`, or the edit in the script."
_MOST_NAMED = 2
"""Fixes that a headline names."""
_LOOKS = {
    **dict.fromkeys(("fixed", "fixed on this call", "raises, as intended"), Look.GOOD),
    **dict.fromkeys(("not tried", "never reached", *_BEARINGS.values()), Look.WARN),
    "passes": Look.GOOD,
    "not fixed": Look.BAD,
}
_ORDER = (Outcome.FIXED, Outcome.NOT_FIXED, Outcome.NOT_TRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyLine:
    """One fix in words.

    Attributes:
        id: its id.
        change: what it changes, beginning with a capital letter; empty where that is not known.
        outcome: ``fixed``, ``fixed on this call`` (of a capsule), ``not fixed``, ``not tried``, ``raises, as intended``, ``never reached``; of an ablation
            ``passes``, ``fails the same way``, ``fails elsewhere``.
        reason: what decided.
        result: how far its run came, beside the baseline (``3/3 steps; 0/3 without it``); empty without a run.
        cures: whether it fixes.
        safe: whether it keeps the meaning of the run.
    """

    id: str
    change: str
    outcome: str
    reason: str
    result: str = ""
    cures: bool = False
    safe: bool = False


def fixes_part(report: Report) -> Section:
    """All fixes, each with what came of it and what it changes, and which to prefer."""
    on_the_call = _on_the_call(report)
    passing = {str(fix["fix"]) for fix in call_fixes(report) if fix["outcome"] != Outcome.NOT_TRIED.value}
    lines = [line for line in remedy_lines(report) if line.outcome != "not tried" or line.id not in passing]
    tried = any(trial.outcome is not Outcome.NOT_TRIED for trial in report.trials)
    blocks = list(_table(lines))
    if any(line.change.endswith(_MARK) for line in lines):
        blocks.append(Paragraph(_UNSAFE, Look.DIM))
    if inside := _inside(report):
        blocks.append(Paragraph(inside))
    if report.replay is not None and cures(report):
        blocks.append(Paragraph(_FIXED_HERE, Look.DIM))
    if report.do_this and report.do_this[0].edits and report.do_this[0].tried == "run":
        blocks.append(
            Paragraph("The edit under Do this was tried in a run of the whole program, in which this failure is gone.")
        )
    if on_the_call:
        blocks += [Heading("on the failing call alone"), *_table(on_the_call)]
        blocks += [Paragraph(_FIXED_HERE, Look.DIM)] if any(line.cures for line in on_the_call) else []
    elif blocks and not tried and report.capsule and "directory" in report.capsule:
        blocks.append(Paragraph(f"Try them on the failing call, without running the script: {replay_command(report)}"))
    if choice := which_one(report):
        blocks += [Heading("which to prefer"), Items(tuple((named(fix), f" if {when}") for fix, when in choice))]
    return Section("Fixes tried" if tried or on_the_call else "Suggested fixes", tuple(blocks), "remedies", "Fixes")


def _table(lines: Sequence[RemedyLine]) -> Iterator[Block]:
    rows: list[tuple[Line, ...]] = []
    for line in lines:
        outcome = Words(line.outcome, outcome_look(line.outcome))
        rows.append((named(line.id), line.change, (outcome, f": {line.reason}") if line.reason else outcome))
    if rows:
        yield Table(("fix", "what it changes", "outcome"), tuple(rows))


def _inside(report: Report) -> str:
    """What a bisection inside the module of a capsule has found, as a sentence; empty where there was none."""
    found = (report.replay or {}).get("inside")
    if not found:
        return ""
    cost = f"{counted(found['runs'], 'run')}, {counted(found['candidates'], 'part')}"
    if not found["parts"]:
        return f"Float32 inside the module does not fix it: {found['why']} ({cost})."
    own = "'s own operators"  # as keep-float32 names them: MODULE::self
    words = " and ".join(
        short(part.removesuffix("::self")) + (own if part.endswith("::self") else "") for part in found["parts"]
    )
    minimal = "no smaller set passes" if found["one_minimal"] else found["why"] or "a smaller set may pass"
    return f"Smallest set of parts that must run in float32: {words} ({minimal}; {cost})."


def _on_the_call(report: Report) -> list[RemedyLine]:
    """Say what became of the fixes that were tried on the failing call when it was kept, each as `exec --try` takes it for the whole script."""
    capsule = report.capsule or {}
    lines = []
    for fix in call_fixes(report):
        name, outcome = str(fix["fix"]), str(fix["outcome"])
        if name == KEEP_FLOAT32 and capsule.get("module"):
            name = f"{name}:{capsule['module']}"
        known = registered(Correction).get(name) or remedy_named(name, lambda _: str(capsule.get("class") or ""))
        summary = known.summary if known is not None else ""
        lines.append(
            RemedyLine(
                id=name,
                change=summary[:1].upper() + summary[1:],
                outcome=_WORDS_HERE.get(outcome, outcome),
                reason=str(fix["reason"]),
                cures=outcome == Outcome.FIXED,
            )
        )
    return lines


def call_fixes(report: Report) -> Sequence[Mapping[str, Any]]:
    """The fixes that were tried on the failing call when it was kept."""
    return (report.capsule or {}).get("fixes") or ()


def replay_command(report: Report, directory: str = "RUN") -> str:
    """What makes the failing call again that was kept in the run's ``directory``."""
    kept = report.capsule or {}
    option = " --allow-code" if kept.get("allow_code") else ""
    return f"dtypedoctor replay {directory}/{kept['directory']}{option}"


def fix_checks(report: Report) -> Iterator[Check]:
    """A check for each fix that was tried: skipped unless it fixes the failure."""
    for trial in report.trials:
        words = f"{outcome_words(trial, here=report.replay is not None)}: {trial.reason}"
        fixed = trial.outcome is Outcome.FIXED
        run = trial.run
        yield Check(
            name=f"remedy {trial.remedy}",
            outcome=Gate.PASSED if fixed else Gate.SKIPPED,
            message=words,
            text=words if fixed else "",
            seconds=seconds_of(run),
        )


def seconds_of(run: RunSummary | None) -> float:
    """How long a run took, for a test report: an older report says only how long its steps did, and none may have been completed."""
    if run is None:
        return 0.0
    return run.seconds if run.seconds is not None else (run.step_time or 0.0) * run.steps_completed


def outcome_look(words: str) -> Look:
    """How an outcome is told apart."""
    return _LOOKS.get(words, Look.PLAIN)


def outcome_words(trial: Trial, *, here: bool = False) -> str:
    """The outcome of a trial as it is written in running text.

    Args:
        trial: of a fix or an ablation.
        here: it was tried on the call of a capsule: what works is *fixed on this call*.
    """
    if here and _is_fix(trial):
        return "fixed on this call"
    if trial.diagnostic is not None and trial.outcome is not Outcome.NOT_TRIED:
        return _BEARINGS[trial.diagnostic.bearing]
    if trial.outcome is Outcome.FIXED and trial.remains:
        return "does not recur, others do"
    if trial.as_intended:
        return "raises, as intended"
    return "never reached" if trial.never_reached else _WORDS[trial.outcome]


def cures(report: Report) -> list[RemedyLine]:
    """The fixes that were tried and fix it, in the order in which they were tried."""
    return [line for trial in report.trials if (line := _of_trial(trial, report)).cures]


def which_one(report: Report) -> list[tuple[str, str]]:
    """Where several fixes work and keep the meaning of the run: the id of each, and when to prefer it."""
    known = [remedies()[line.id] for line in cures(report) if line.id in remedies()]
    told = [(remedy.id, remedy.prefer) for remedy in known if remedy.prefer]
    return told if len(told) > 1 else []


def cured_sentence(trials: Sequence[Trial], *, here: bool = False) -> str:
    """What fixes it, to follow a headline; fixes that may only hide the failure count where nothing else helps.

    Args:
        trials: what was tried.
        here: on the call of a capsule.
    """
    fixed = list(filter(_is_fix, trials))
    if safe := [trial.remedy for trial in fixed if trial.safe]:
        return f" {'On this call, fixed by' if here else 'Fixed by'} {_some(safe)}."
    if fixed:
        return f" It disappears with {fixed[0].remedy}, which may only hide it."
    for trial in trials:
        if trial.outcome is Outcome.FIXED and trial.remains:
            return f" It does not recur with {trial.remedy}, but {', '.join(trial.remains)} is found."
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" (and {len(names) - _MOST_NAMED} more)" if len(names) > _MOST_NAMED else ""
    return " or ".join(names[:_MOST_NAMED]) + more


def remedy_lines(report: Report) -> list[RemedyLine]:
    """All fixes: those that work, those that do not, those that were not tried, those that are only proposed."""
    ordered = sorted(report.trials, key=lambda trial: _ORDER.index(trial.outcome))
    lines = [_of_trial(trial, report) for trial in ordered]
    tried = {trial.remedy for trial in report.trials}
    for name in dict.fromkeys(name for finding in report.findings for name in finding.remedies if name not in tried):
        known = remedies().get(name)
        change = _sentence(known.summary) if known is not None else ""
        lines.append(RemedyLine(id=name, change=change, outcome="not tried", reason="no fix was tried in this run"))
    return lines


def _of_trial(trial: Trial, report: Report) -> RemedyLine:
    mark = DIAGNOSTIC if trial.diagnostic is not None else "" if trial.safe else _MARK
    return RemedyLine(
        id=trial.remedy,
        change=_sentence(trial.summary) + mark,
        outcome=outcome_words(trial, here=report.replay is not None),
        reason=trial.reason,
        result=_result(trial, report),
        cures=_is_fix(trial),
        safe=trial.safe,
    )


def _is_fix(trial: Trial) -> bool:
    return trial.outcome is Outcome.FIXED and trial.diagnostic is None and not trial.remains


def _result(trial: Trial, report: Report) -> str:
    if trial.run is None or not trial.run.steps_planned:
        return ""
    planned, before = trial.run.steps_planned, report.before
    done = f"{trial.run.steps_completed}/{planned} steps"
    if before is None or before.steps_planned != planned:
        return done
    return f"{done}; {before.steps_completed}/{planned} without it"


def _sentence(text: str) -> str:
    """``text`` with a full stop behind, and a capital letter in front unless it begins with the id of a fix."""
    text = text.strip().rstrip(".")
    first = text.partition(" ")[0]
    return f"{text if '-' in first else text[:1].upper() + text[1:]}." if text else ""


def ended_with(report: Report) -> str:
    """What the baseline raised, when and where; empty where it did not raise, or the headline says it already."""
    ended = report.before.ended if report.before is not None else "completed"
    return one_line(ended, 400) if report.status is Status.FINDINGS and ended != "completed" else ""


_MOST_BESIDE, _MOST_RUNS = 4, 12
"""Runs in one table, and in all."""

_UNEXPLAINED = "operand-dtype-mismatch"
"""What a dtype mismatch is called without an op trace that tells where its dtypes come from."""
_CORRECTED = ("elements replaced", "elements clamped")
"""Rows that say something only where a correction had something to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One run beside the others: the baseline, that of a fix, or the reference."""

    label: str
    run: RunSummary
    findings: tuple[str, ...]
    ended: str = "completed"
    trial: Trial | None = None
    here: bool = False

    @property
    def failed(self) -> bool:
        """Whether it is the run of a fix that does not work."""
        return self.trial is not None and self.trial.outcome is not Outcome.FIXED


def before_after(report: Report) -> Section:
    """Show the runs side by side, those of fixes that do not work folded away."""
    runs = columns(report)
    if not runs:
        return Section("The run", ())
    failed = [run for run in runs if run.failed]
    blocks: list[Block] = [*side_by_side([run for run in runs if not run.failed])]
    blocks += [Paragraph(note, Look.DIM) for note in _notes(report, runs)]
    if failed:
        blocks.append(Fold(_failed_title(failed), side_by_side(failed)))
    return Section("Baseline and fixes" if len(runs) > 1 else "The run", tuple(blocks), "compare", "Runs")


def _failed_title(failed: Sequence[Column]) -> str:
    """Name what does not work: fixes, and checks, which are there to raise."""
    checks = sum(run.trial is not None and run.trial.as_intended for run in failed)
    fixes = len(failed) - checks
    parts = [counted(fixes, "fix that does", "fixes that do") + " not work"] if fixes else []
    parts += [counted(checks, "check that raises", "checks that raise") + ", as intended"] if checks else []
    return ", ".join(parts)


def columns(report: Report) -> list[Column]:
    """List the baseline, the fixes that work, the reference, and the fixes that do not work."""
    baseline, reference, here = report.before, report.reference, report.replay is not None
    runs, failed = list[Column](), list[Column]()
    if baseline is not None:  # the message that it ended with stands above already
        ids = tuple(dict.fromkeys(finding.id for finding in report.findings))
        ended = baseline.ended.partition(": ")[0] if ended_with(report) else baseline.ended
        runs.append(Column(label="baseline", run=baseline, findings=ids, ended=ended))
    for trial in report.trials:
        if trial.run is not None:
            run = Column(label=trial.remedy, run=trial.run, findings=trial.run.finding_ids, trial=trial, here=here)
            (failed if run.failed else runs).append(run)
    if reference is not None:
        ended = reference.ended
        runs.append(Column(label=reference.label, run=reference, findings=reference.finding_ids, ended=ended))
    return runs + failed


def side_by_side(runs: Sequence[Column]) -> tuple[Block, ...]:
    """Lay out runs in as many tables as it takes."""
    kept = runs[:_MOST_RUNS]
    blocks: list[Block] = [_together(kept[i : i + _MOST_BESIDE]) for i in range(0, len(kept), _MOST_BESIDE)]
    if len(kept) < len(runs):
        blocks.append(Paragraph(f"{len(runs) - len(kept)} more runs left out; report.json has them.", Look.DIM))
    return tuple(blocks)


def _together(runs: Sequence[Column]) -> Table:
    """Lay out a few runs; rows in which none has anything to say are left out."""
    columns, rows = list(map(_rows, runs)), list[tuple[Line, ...]]()
    for label in columns[0]:
        cells = [column[label] for column in columns]
        silent = {ABSENT, "0"} if label in _CORRECTED else {ABSENT}
        if not silent.issuperset(cells):
            rows.append((label, *(Words(text, outcome_look(text)) for text in cells)))
    return Table(("", *(run.label for run in runs)), tuple(rows))


def _reference(report: Report) -> str:
    """What the reference is, in a sentence; empty where there is none, or the report does not tell."""
    if report.reference is None:
        return ""
    known = report.scenario.get("reference")
    if not isinstance(known, Mapping):
        return ""
    changes = [
        f"every model in {known.get('dtype', 'bfloat16')}",
        "" if known.get("autocast") else "no autocast",
        "" if known.get("compile", True) else "nothing compiled",
    ]
    return f"The reference is the baseline with {' and '.join(filter(None, changes))}."


def _notes(report: Report, runs: Sequence[Column]) -> list[str]:
    notes = list(filter(None, [_reference(report)]))
    bases = sorted({t.ratio_base for t in report.trials if t.ratio_base and t.run})
    if bases:
        notes.append(f"× is the ratio to the {', '.join('baseline' if base == 'before' else base for base in bases)}.")
    if any(t.parity for t in report.trials):
        notes.append("KL: policy against reference, on the token log-probabilities of the same inputs, per step.")
    if any(run.run.output_error is not None for run in runs):
        notes.append(
            "Output error: relative difference between the outputs before the first step and those of the same weights in "
            f"float32. Below 0.03 is rounding; above {WRONG_OUTPUT:g} is wrong."
        )

    # A mismatch that the baseline explains has the fallback's name in runs with fixes
    explained = all(finding.id != _UNEXPLAINED for finding in report.findings)
    unexplained_elsewhere = any(trial.run and _UNEXPLAINED in trial.run.finding_ids for trial in report.trials)
    if explained and unexplained_elsewhere:
        notes.append(
            f"Only the baseline has an op trace, so in the other runs any dtype mismatch is reported as {_UNEXPLAINED}."
        )

    # The program's own log may show other losses than were computed
    run = report.before
    if run is not None and run.log_filter and run.nonfinite.get("loss"):
        count_of = f"{len(run.nonfinite['loss'])} of {counted(len(run.loss), 'loss', 'losses')}"
        notes.append(
            f"{run.log_filter} logs 0 in place of NaN or inf (logging_nan_inf_filter=True): {count_of} here, which the table shows as computed. "
            "TrainingArguments(logging_nan_inf_filter=False) logs them as they are."
        )
    return notes


def _rows(column: Column) -> dict[str, str]:
    """What one run has to say, by the labels of the table's rows."""
    run, trial = column.run, column.trial
    return {
        "outcome": outcome_words(trial, here=column.here) if trial else column.ended,
        # nobody but a script itself knows what it plans
        "steps completed": f"{run.steps_completed}{f'/{run.steps_planned}' if run.steps_planned else ''}",
        "findings": ", ".join(column.findings) or "none",
        "loss": span(run.numbers("loss")),
        "grad_norm": span(run.numbers("grad_norm")),
        "reward": span(run.numbers("reward")),
        "step time": _with_ratio(duration(run.step_time), trial.step_time_ratio if trial else None),
        "peak memory": _with_ratio(memory(run.peak_memory), trial.peak_memory_ratio if trial else None),
        "elements replaced": count(trial.rescued_elements if trial else None),
        "elements clamped": count(trial.clamped_elements if trial else None),
        **_parity(trial.parity if trial else None),
        "output error": number(run.output_error),
        # where nothing was fixed there is nothing to hide
        "side effects": ("none known" if trial.safe else "may hide a failure")
        if trial is not None and trial.outcome is Outcome.FIXED
        else ABSENT,
    }


def _with_ratio(text: str, factor: float | None) -> str:
    return f"{text} ({ratio(factor)})" if factor is not None else text


def _parity(parity: Parity | None) -> dict[str, str]:
    """How far the policy is from the reference's."""
    if parity is None:
        return dict.fromkeys(("KL p50, p95, max", "KL total", "equal rewards"), ABSENT)
    equal = parity.reward_equal_steps
    return {
        "KL p50, p95, max": " / ".join(map(number, (parity.median_kl, parity.p95_kl, parity.max_kl))),
        "KL total": f"{number(parity.total_kl)} in {counted(parity.steps_compared, 'step')}",
        "equal rewards": f"{equal}/{parity.steps_compared} steps" if equal is not None else ABSENT,
    }


def about(reach: "Reach") -> str:
    """What a fix changes, in a library line by line, and what can be done with it."""
    remedy = reach.remedy
    unsafe = "" if remedy.safe else " (not safe: it may hide what disagrees)"
    lines = [f"{remedy.id}: {remedy.summary}{unsafe}"]
    if reach.edited:
        lines += [f"Tried on {reach.releases}.", ""]
        for edit in reach.edited.edits:
            lines.append(f"{edit.module}.{edit.function}")
            lines += [f"  - {line}" for line in edit.old.strip("\n").splitlines()]
            lines += [f"  + {line}" for line in edit.new.strip("\n").splitlines()]
    lines.append("")
    if reach.tried_by:
        lines.append(f"Does it fix a script?  dtypedoctor exec {reach.tried_by} train.py")
    if reach.kept:
        lines.append(f"Keep it in place:      dtypedoctor treat --with {remedy.id} train.py")
    if reach.applied:
        lines.append(f'In one line of Python: dtypedoctor.apply(model, "{remedy.id}")')
    if reach.edited:
        lines.append(f"Propose it upstream:   dtypedoctor explain {remedy.id} --patch")
    if remedy.by_hand:
        lines.append(f"In your own script:    {remedy.by_hand}")
    if not reach.tried_by:
        lines.append(f"In a scenario only:    remedies: [{remedy.id}]")
    if reach.released:
        lines.append(f"In a released library: {', '.join(reach.released)}")
    return "\n".join(lines)


def check(correction: Correction, folders: list[str]) -> None:
    """Compares what a correction edits with the library's files, where they can be found; nothing of the library is imported.

    Raises:
        UsageError: a file is not what the correction was written for. One that has the correction already is all right.
    """
    for file, shown, edits in files_of(correction.edits, folders):
        with contextlib.suppress(AlreadyCorrectedError), _fitting(correction, file):
            patched(file.read_text(encoding="utf-8"), edits, shown)


@contextlib.contextmanager
def _fitting(correction: Correction, file: Path) -> Iterator[None]:
    """Names the release and those that were tried where a file is not what a correction was written for."""
    try:
        yield
    except AlreadyCorrectedError:
        raise
    except TargetMismatchError as error:
        release = f"{correction.library} {release_of(correction.library, file)}".strip()
        raise UsageError(
            f"{correction.id} does not fit {release}: {error}",
            f"It was tried on {correction.library} {', '.join(correction.seen)}.",
        ) from error


def patch_of(correction: Correction, folders: list[str]) -> str:
    """A diff against the library's source, for ``git apply`` or ``patch -p1``, that adds the test as well.

    Raises:
        UsageError: the library is not there, or its source is not what the correction was written for.
    """
    library = correction.library
    found = list(files_of(correction.edits, folders))
    package = file_of(library, folders)
    if not found and package is not None:
        with _fitting(correction, package):
            raise TargetMismatchError(f"it has no {correction.edits[0].module}")
    if not found:
        hint = f"pip install --no-deps --target DIR {library}=={correction.seen[-1]}, then pass --source DIR."
        raise UsageError(f"{correction.id}: the package {library} was not found", hint)
    diffs: list[str] = []
    for file, shown, edits in found:
        text = file.read_text(encoding="utf-8")
        try:
            with _fitting(correction, file):
                diffs += _diff(text, patched(text, edits, shown), f"a/{shown}", f"b/{shown}")
        except AlreadyCorrectedError as error:
            raise UsageError(
                f"{correction.id} is not needed: {library} {release_of(library, file)}: {error}"
            ) from error
    if correction.test:
        test = files("dtypedoctor.lab.corrections.libraries").joinpath(correction.test).read_text(encoding="utf-8")
        name = correction.id.replace("-", "_")
        diffs += _diff("", test, "/dev/null", f"b/tests/test_{name}.py")
    return "".join(diffs)


def _diff(before: str, after: str, old: str, new: str) -> Iterator[str]:
    for line in unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), old, new):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
