"""The baseline beside the runs with fixes and the reference: one column per run, one row per quantity."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from dtypedoctor.report.document import Block, Fold, Line, Look, Paragraph, Section, Table, Words
from dtypedoctor.report.model import Outcome, Parity, Report, RunSummary, Trial
from dtypedoctor.report.run_facts import ended_with, outcome_look, outcome_words
from dtypedoctor.report.text import ABSENT, count, counted, duration, memory, number, ratio, span
from dtypedoctor.scenario.model import Reference
from dtypedoctor.trials.results import WRONG_OUTPUT

_MOST_BESIDE, _MOST_RUNS = 4, 12
"""Runs in one table, and in all."""

_UNEXPLAINED = "operand-dtype-mismatch"
"""What a dtype mismatch is called without an op trace that tells where its dtypes come from."""
_CORRECTED = ("elements replaced", "elements clamped")
"""Rows that say something only where a correction had something to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One run: its label, one cell per row, whether its fix does not work, and whether it is a check, which is there to raise."""

    label: str
    cells: tuple[str, ...]
    is_failed_remedy: bool
    is_check: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Row labels, the columns under them, and notes that belong below the table."""

    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    @property
    def main(self) -> tuple[Column, ...]:
        """What has to be seen: the baseline, the fixes that work, the reference."""
        return tuple(column for column in self.columns if not column.is_failed_remedy)

    @property
    def failed(self) -> tuple[Column, ...]:
        """The runs with fixes that do not work."""
        return tuple(column for column in self.columns if column.is_failed_remedy)

    @property
    def failed_title(self) -> str:
        """What the table of :attr:`failed` holds: fixes, and checks, which are there to raise."""
        checks = sum(column.is_check for column in self.failed)
        remedies = len(self.failed) - checks
        parts = [counted(remedies, "fix that does", "fixes that do") + " not work"] if remedies else []
        parts += [counted(checks, "check that raises", "checks that raise") + ", as intended"] if checks else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
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
    """The runs side by side and step by step, those of fixes that do not work folded away."""
    found = compare(report)
    if not found.columns:
        return Section("The run", ())
    title = "Baseline and fixes" if len(found.columns) > 1 else "The run"
    blocks: list[Block] = [*side_by_side(found.rows, found.main)]
    blocks += [Paragraph(note, Look.DIM) for note in found.notes]
    if found.failed:
        blocks.append(Fold(found.failed_title, side_by_side(found.rows, found.failed)))
    return Section(title, tuple(blocks), "compare", "Runs")


def side_by_side(labels: Sequence[str], columns: Sequence[Column]) -> tuple[Block, ...]:
    """Runs side by side, in as many tables as it takes; rows in which none of them has anything to say are left out."""
    kept = columns[:_MOST_RUNS]
    blocks: list[Block] = []
    for part in (kept[i : i + _MOST_BESIDE] for i in range(0, len(kept), _MOST_BESIDE)):
        said = [i for i in range(len(labels)) if any(column.cells[i] != ABSENT for column in part)]
        rows: tuple[tuple[Line, ...], ...] = tuple(
            (labels[i], *(_cell(column.cells[i]) for column in part)) for i in said
        )
        blocks.append(Table(("", *(column.label for column in part)), rows))
    if len(kept) < len(columns):
        blocks.append(Paragraph(f"{len(columns) - len(kept)} more runs left out; report.json has them.", Look.DIM))
    return tuple(blocks)


def _cell(text: str) -> Words:
    return Words(text, outcome_look(text))


def runs(report: Report) -> tuple[RunSummary, ...]:
    """The runs that are compared: the baseline, each trial that fixes, the reference, each trial that does not."""
    return tuple(entry.run for entry in _entries(report))


def compare(report: Report) -> Comparison:
    """The table of ``report``; rows in which no run has anything to say are left out."""
    entries = _entries(report)
    table = [(label, [cell(entry) for entry in entries]) for label, cell in _ROWS.items()]
    kept = [(label, cells) for label, cells in table if not all(_is_empty(cell, label) for cell in cells)]
    columns = tuple(
        Column(
            label=entry.label,
            cells=tuple(cells[i] for _, cells in kept),
            is_failed_remedy=entry.failed,
            is_check=entry.trial is not None and entry.trial.as_intended,
        )
        for i, entry in enumerate(entries)
    )
    return Comparison(rows=tuple(label for label, _ in kept), columns=columns, notes=tuple(_notes(report)))


def _is_empty(cell: str, row: str) -> bool:
    return cell == ABSENT or (cell == "0" and row in _CORRECTED)


def _entries(report: Report) -> list[_Entry]:
    found = tuple(dict.fromkeys(finding.id for finding in report.findings))
    entries = (
        [_Entry(label="baseline", run=report.before, findings=found, ended=_before(report))] if report.before else []
    )
    here = report.replay is not None
    tried = [
        _Entry(label=t.remedy, run=t.run, findings=t.run.finding_ids, trial=t, here=here)
        for t in report.trials
        if t.run
    ]
    entries += [entry for entry in tried if not entry.failed]
    if report.reference:
        entries.append(
            _Entry(
                label=report.reference.label,
                run=report.reference,
                findings=report.reference.finding_ids,
                ended=report.reference.ended,
            )
        )
    return entries + [entry for entry in tried if entry.failed]


def _before(report: Report) -> str:
    """How the baseline ended, without the message that stands above already."""
    ended = report.before.ended if report.before else ""
    return ended.partition(": ")[0] if ended_with(report) else ended


def _reference(report: Report) -> str:
    """What the reference is, in a sentence; empty where there is none, or the report does not tell."""
    if report.reference is None:
        return ""
    try:
        known = Reference.model_validate(report.scenario.get("reference"))
    except ValidationError:
        return ""
    changes = [
        f"every model in {known.dtype}",
        "" if known.autocast else "no autocast",
        "" if known.compile else "nothing compiled",
    ]
    return f"The reference is the baseline with {' and '.join(filter(None, changes))}."


def _notes(report: Report) -> list[str]:
    notes = list(filter(None, [_reference(report)]))
    bases = sorted({t.ratio_base for t in report.trials if t.ratio_base and t.run})
    if bases:
        notes.append(f"× is the ratio to the {', '.join('baseline' if base == 'before' else base for base in bases)}.")
    if any(t.parity for t in report.trials):
        notes.append("KL: policy against reference, on the token log-probabilities of the same inputs, per step.")
    if any(entry.run.output_error is not None for entry in _entries(report)):
        notes.append(
            "Output error: relative difference between the outputs before the first step and those of the same weights in "
            f"float32. Below 0.03 is rounding; above {WRONG_OUTPUT:g} is wrong."
        )
    notes += _about_mismatches(report)
    notes += _about_logs(report)
    return notes


def _about_mismatches(report: Report) -> Iterator[str]:
    """Why a mismatch that the baseline explains has the fallback's name in runs with fixes."""
    explained = all(finding.id != _UNEXPLAINED for finding in report.findings)
    unexplained_elsewhere = any(trial.run and _UNEXPLAINED in trial.run.finding_ids for trial in report.trials)
    if explained and unexplained_elsewhere:
        yield f"Only the baseline has an op trace, so in the other runs any dtype mismatch is reported as {_UNEXPLAINED}."


def _about_logs(report: Report) -> Iterator[str]:
    """That the program's own log shows other losses than were computed."""
    run = report.before
    if run is not None and run.log_filter and run.nonfinite.get("loss"):
        count_of = f"{len(run.nonfinite['loss'])} of {counted(len(run.loss), 'loss', 'losses')}"
        yield (
            f"{run.log_filter} logs 0 in place of NaN or inf (logging_nan_inf_filter=True): {count_of} here, which the table shows as computed. "
            "TrainingArguments(logging_nan_inf_filter=False) logs them as they are."
        )


def _outcome(entry: _Entry) -> str:
    if entry.trial:
        return outcome_words(entry.trial, here=entry.here)
    return entry.ended


def _steps(entry: _Entry) -> str:
    planned = entry.run.steps_planned  # nobody but a script itself knows what it plans
    return f"{entry.run.steps_completed}/{planned}" if planned else str(entry.run.steps_completed)


def _with_ratio(text: str, factor: float | None) -> str:
    return f"{text} ({ratio(factor)})" if factor is not None else text


def _step_time(entry: _Entry) -> str:
    return _with_ratio(duration(entry.run.step_time), entry.trial.step_time_ratio if entry.trial else None)


def _peak_memory(entry: _Entry) -> str:
    return _with_ratio(memory(entry.run.peak_memory), entry.trial.peak_memory_ratio if entry.trial else None)


def _of_trial(pick: Callable[[Trial], str]) -> Callable[[_Entry], str]:
    return lambda entry: pick(entry.trial) if entry.trial else ABSENT


def _of_parity(pick: Callable[[Parity], str]) -> Callable[[_Entry], str]:
    return _of_trial(lambda trial: pick(trial.parity) if trial.parity else ABSENT)


def _kl(parity: Parity) -> str:
    return " / ".join(map(number, (parity.median_kl, parity.p95_kl, parity.max_kl)))


def _safe(trial: Trial) -> str:
    """Whether it may hide a failure, by what the fix does; where nothing was fixed there is nothing to hide."""
    if trial.outcome is not Outcome.FIXED:
        return ABSENT
    return "none known" if trial.safe else "may hide a failure"


def _reward_equal(parity: Parity) -> str:
    if parity.reward_equal_steps is None:
        return ABSENT
    return f"{parity.reward_equal_steps}/{parity.steps_compared} steps"


_ROWS: dict[str, Callable[[_Entry], str]] = {
    "outcome": _outcome,
    "steps completed": _steps,
    "findings": lambda entry: ", ".join(entry.findings) or "none",
    "loss": lambda entry: span(entry.run.numbers("loss")),
    "grad_norm": lambda entry: span(entry.run.numbers("grad_norm")),
    "reward": lambda entry: span(entry.run.numbers("reward")),
    "step time": _step_time,
    "peak memory": _peak_memory,
    "elements replaced": _of_trial(lambda trial: count(trial.rescued_elements)),
    "elements clamped": _of_trial(lambda trial: count(trial.clamped_elements)),
    "KL p50, p95, max": _of_parity(_kl),
    "KL total": _of_parity(lambda parity: f"{number(parity.total_kl)} in {counted(parity.steps_compared, 'step')}"),
    "equal rewards": _of_parity(_reward_equal),
    "output error": lambda entry: number(entry.run.output_error),
    "side effects": _of_trial(_safe),
}
