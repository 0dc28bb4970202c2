"""Several reports as one matrix: what each scenario showed, what cured it, and whether it is as the scenario says."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter

from dtypedoctor.diagnosis.finding import Confidence
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json
from dtypedoctor.report.model import Outcome, Report, Status

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One scenario.

    Attributes:
        scenario: its name.
        status: that of its report; ``refused`` where it could not be run at all.
        before: how the untreated run ended, in words.
        finding: id of the first finding, its place (fqn, op, phase) and its confidence; None without a finding.
        cause: the first finding's headline; the reason where the scenario was refused.
        findings: ids of all findings, the root cause first.
        output_error: relative output error of the untreated run against float32, where measured.
        cured_by, not_cured_by, not_tried: remedies by outcome; ``unsafe`` names those that cast without a word.
        as_expected: whether the scenario showed what it says it shows; a healthy one says that nothing is found.
        exit: what ``dtypedoctor run`` would exit with for it alone.
        seconds: wall-clock time of all its runs.
        report: path of its report, relative to the matrix.
    """

    scenario: str
    status: str
    before: str
    finding: str | None = None
    fqn: str | None = None
    op: str | None = None
    phase: str | None = None
    confidence: str | None = None
    cause: str = ""
    findings: tuple[str, ...] = ()
    output_error: float | None = None
    cured_by: tuple[str, ...] = ()
    not_cured_by: tuple[str, ...] = ()
    not_tried: tuple[str, ...] = ()
    unsafe: tuple[str, ...] = ()
    as_expected: bool
    exit: int
    seconds: float = 0.0
    report: str | None = None

    @property
    def proven(self) -> bool:
        """Whether the cause was settled by a counterfactual."""
        return self.confidence == Confidence.PROVEN


def row_of(report: Report, *, exit_code: int, seconds: float, path: str) -> MatrixRow:
    """The row of a finished report, which should be redacted: the matrix is made to be shown."""
    row = MatrixRow(
        scenario=report.name,
        status=report.status.value,
        before=report.before.ended if report.before else "",
        cause=report.headline,
        findings=tuple(finding.id for finding in report.findings),
        output_error=report.before.output_error if report.before else None,
        cured_by=_remedies(report, Outcome.FIXED),
        not_cured_by=_remedies(report, Outcome.NOT_FIXED),
        not_tried=_remedies(report, Outcome.NOT_TRIED),
        unsafe=tuple(trial.remedy for trial in report.trials if not trial.safe),
        as_expected=_as_expected(report),
        exit=exit_code,
        seconds=seconds,
        report=path,
    )
    if not report.findings:
        return row
    first = report.findings[0]
    return replace(
        row,
        finding=first.id,
        fqn=first.fqn,
        op=first.op,
        phase=first.phase,
        confidence=first.confidence.value,
        cause=first.summary,
    )


def refused_report(scenario: str, message: str) -> Report:
    """Stands for a scenario that could not be run where reports are shown and not rows."""
    return Report(name=scenario, status=Status.ERROR, headline=f"The scenario could not be run: {message}")


def refused_row(scenario: str, message: str, *, exit_code: int) -> MatrixRow:
    """The row of a scenario that could not be run, with the reason."""
    return MatrixRow(
        scenario=scenario, status="refused", before="not run", cause=message, as_expected=False, exit=exit_code
    )


def in_one_line(row: MatrixRow) -> str:
    """The row as a line of progress."""
    verdict = "as it says" if row.as_expected else "NOT as it says"
    found = row.finding or ("refused" if row.status == "refused" else "no finding")
    return f"{row.scenario}: {verdict} ({found}, {row.seconds:.1f} s)"


def render_matrix_json(rows: Sequence[MatrixRow], *, exit_code: int) -> str:
    """``matrix.json``: the rows, whether all are as expected, and the exit code of the whole command."""
    document = {
        "schema": SCHEMA,
        "as_expected": all(row.as_expected for row in rows),
        "exit": exit_code,
        "seconds": sum(row.seconds for row in rows),
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def read_matrix_json(text: str) -> list[MatrixRow]:
    """The rows that :func:`render_matrix_json` wrote; unknown keys are ignored.

    Raises:
        UsageError: not a matrix, or one of a newer schema.
    """
    try:
        document = parse_json(text)
        if document["schema"] > SCHEMA:
            raise UsageError(f"this matrix has schema {document['schema']}, newer than {SCHEMA}", "Update dtypedoctor.")
        return TypeAdapter(list[MatrixRow]).validate_json(json.dumps(document["rows"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError("not a matrix of dtypedoctor", "Run the scenarios again.") from error


def _as_expected(report: Report) -> bool:
    return report.expectation_met if report.expectation_met is not None else report.status is Status.HEALTHY


def _remedies(report: Report, outcome: Outcome) -> tuple[str, ...]:
    return tuple(trial.remedy for trial in report.trials if trial.outcome is outcome)
