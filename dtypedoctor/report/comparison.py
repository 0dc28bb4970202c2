"""The before/after table, in words: one column per run, one row per quantity. Every format lays out these same cells."""

from collections.abc import Callable
from dataclasses import dataclass

from dtypedoctor.report.model import Outcome, Parity, Report, RunSummary, Trial
from dtypedoctor.report.numbers import ABSENT, count, duration, memory, number, ratio, span

__all__ = ["Column", "Comparison", "compare", "outcome_words", "runs"]

_WORDS = {Outcome.FIXED: "fixed", Outcome.NOT_FIXED: "not fixed", Outcome.NOT_TRIED: "not tried"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One run: its label, what it is (``before``, ``remedy`` or ``reference``) and one cell per row."""

    label: str
    role: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Row labels, the columns under them, and notes that belong below the table."""

    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    role: str
    label: str
    run: RunSummary
    trial: Trial | None = None


def outcome_words(outcome: Outcome) -> str:
    """The outcome of a trial as it is written in running text."""
    return _WORDS[outcome]


def runs(report: Report) -> tuple[RunSummary, ...]:
    """The runs that are compared: before, each trial that ran, the reference."""
    return tuple(entry.run for entry in _entries(report))


def compare(report: Report) -> Comparison:
    """The table of ``report``; rows in which no run has anything to say are left out."""
    entries = _entries(report)
    table = [(label, [cell(entry) for entry in entries]) for label, cell in _ROWS.items()]
    kept = [(label, cells) for label, cells in table if any(cell != ABSENT for cell in cells)]
    columns = tuple(
        Column(label=entry.label, role=entry.role, cells=tuple(cells[i] for _, cells in kept))
        for i, entry in enumerate(entries)
    )
    return Comparison(rows=tuple(label for label, _ in kept), columns=columns, notes=tuple(_notes(report)))


def _entries(report: Report) -> list[_Entry]:
    entries = [_Entry(role="before", label="before", run=report.before)] if report.before else []
    entries += [_Entry(role="remedy", label=t.remedy, run=t.run, trial=t) for t in report.trials if t.run]
    if report.reference:
        entries.append(_Entry(role="reference", label=report.reference.label, run=report.reference))
    return entries


def _notes(report: Report) -> list[str]:
    notes = []
    bases = sorted({t.ratio_base for t in report.trials if t.ratio_base and t.run})
    if bases:
        notes.append(f"× compares with the run “{', '.join(bases)}”.")
    if any(t.parity for t in report.trials):
        notes.append("KL is that of the policy's token log-probabilities against the reference on the same inputs.")
    return notes


def _outcome(entry: _Entry) -> str:
    if entry.trial:
        return outcome_words(entry.trial.outcome)
    return entry.run.ended


def _steps(entry: _Entry) -> str:
    planned = entry.run.steps_planned  # nobody but a script itself knows what it plans
    return f"{entry.run.steps_completed} of {planned}" if planned else str(entry.run.steps_completed)


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


def _reward_equal(parity: Parity) -> str:
    if parity.reward_equal_steps is None:
        return ABSENT
    return f"{parity.reward_equal_steps} of {parity.steps_compared}"


_ROWS: dict[str, Callable[[_Entry], str]] = {
    "outcome": _outcome,
    "steps completed": _steps,
    "findings": lambda entry: ", ".join(entry.run.finding_ids) or "none",
    "loss": lambda entry: span(entry.run.loss),
    "grad_norm": lambda entry: span(entry.run.grad_norm),
    "reward": lambda entry: span(entry.run.reward),
    "step time": _step_time,
    "peak memory": _peak_memory,
    "rescued elements": _of_trial(lambda trial: count(trial.rescued_elements)),
    "clamped elements": _of_trial(lambda trial: count(trial.clamped_elements)),
    "KL median": _of_parity(lambda parity: number(parity.median_kl)),
    "KL p95": _of_parity(lambda parity: number(parity.p95_kl)),
    "KL max": _of_parity(lambda parity: number(parity.max_kl)),
    "KL total": _of_parity(lambda parity: number(parity.total_kl)),
    "KL steps compared": _of_parity(lambda parity: count(parity.steps_compared)),
    "equal rewards": _of_parity(_reward_equal),
    "output error": lambda entry: number(entry.run.output_error),
    "safe": _of_trial(lambda trial: "yes" if trial.safe else "no"),
}
