"""The baseline beside the runs with fixes and the reference: one column per run, one row per quantity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtypedoctor.examination.results import WRONG_OUTPUT
from dtypedoctor.report.document import Block, Fold, Line, Look, Paragraph, Section, Table, Words
from dtypedoctor.report.fixes import outcome_look, outcome_words
from dtypedoctor.report.model import Outcome, Parity, Report, RunSummary, Trial
from dtypedoctor.report.run_facts import ended_with
from dtypedoctor.text import ABSENT, count, counted, duration, memory, number, ratio, span

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


def columns(report: Report) -> list[Column]:
    """List the baseline, the fixes that work, the reference, and the fixes that do not work."""
    ids, here = tuple(dict.fromkeys(finding.id for finding in report.findings)), report.replay is not None
    runs = [Column(label="baseline", run=report.before, findings=ids, ended=_before(report))] if report.before else []
    tried = [
        Column(label=t.remedy, run=t.run, findings=t.run.finding_ids, trial=t, here=here)
        for t in report.trials
        if t.run
    ]
    runs += [run for run in tried if not run.failed]
    if (healthy := report.reference) is not None:
        runs.append(Column(label=healthy.label, run=healthy, findings=healthy.finding_ids, ended=healthy.ended))
    return runs + [run for run in tried if run.failed]


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


def _failed_title(failed: Sequence[Column]) -> str:
    """Name what does not work: fixes, and checks, which are there to raise."""
    checks = sum(run.trial is not None and run.trial.as_intended for run in failed)
    fixes = len(failed) - checks
    parts = [counted(fixes, "fix that does", "fixes that do") + " not work"] if fixes else []
    parts += [counted(checks, "check that raises", "checks that raise") + ", as intended"] if checks else []
    return ", ".join(parts)


def _before(report: Report) -> str:
    """How the baseline ended, without the message that stands above already."""
    ended = report.before.ended if report.before else ""
    return ended.partition(": ")[0] if ended_with(report) else ended


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
        "side effects": _side_effects(trial),
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


def _side_effects(trial: Trial | None) -> str:
    """Whether a fix may hide a failure; where nothing was fixed there is nothing to hide."""
    if trial is None or trial.outcome is not Outcome.FIXED:
        return ABSENT
    return "none known" if trial.safe else "may hide a failure"
