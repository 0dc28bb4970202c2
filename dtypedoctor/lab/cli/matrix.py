"""The matrix of several scenarios: a row for each, as a file and as a document."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.errors import INTERRUPTED, ExitCode, UsageError
from dtypedoctor.foreign_files import inside, parse_json, read_file, read_head, reason
from dtypedoctor.report.document import Block, Document, Facts, Line, Look, Paragraph, Section, Table, Words, named
from dtypedoctor.report.files import read_report
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.run_facts import ranked_facts
from dtypedoctor.report.to_json import Outcome, Report, Status
from dtypedoctor.text import ABSENT, counted, duration, number

MATRIX_JSON = "matrix.json"
SCHEMA = 1

NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One scenario.

    Attributes:
        scenario: its name.
        status: that of its report; ``refused`` where it could not be run at all, ``not run`` where Ctrl-C came before its end.
        before: how the baseline ended, in words.
        finding: id of the first finding, its place (fqn, op, phase) and its confidence; None without a finding.
        cause: the first finding's headline; the reason where the scenario was refused.
        findings: ids of all findings, the root cause first.
        output_error: relative output error of the baseline against float32, where measured.
        cured_by, not_cured_by, not_tried: fixes by outcome; ``unsafe`` names those that cast silently.
        as_expected: whether the scenario showed what it says it shows; a healthy one says that nothing is found. None where
            it was seen with other releases of its libraries than these.
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
    as_expected: bool | None
    exit: int
    seconds: float = 0.0
    report: str | None = None

    @property
    def proven(self) -> bool:
        """Whether the cause was settled by a counterfactual."""
        return self.confidence == Confidence.PROVEN


def row_of(report: Report, *, exit_code: int, seconds: float, path: str) -> MatrixRow:
    """The row of a finished report, which should be redacted: the matrix is made to be shown."""
    first = report.findings[0] if report.findings else None
    place = (
        {
            "finding": first.id,
            "fqn": first.fqn,
            "op": first.op,
            "phase": first.phase,
            "confidence": first.confidence.value,
        }
        if first is not None
        else {}
    )
    return MatrixRow(
        scenario=report.name,
        status=report.status.value,
        before=report.before.ended if report.before else "",
        cause=first.summary if first is not None else report.headline,
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
        **place,
    )


def refused_report(scenario: str, message: str) -> Report:
    """Stands for a scenario that could not be run where reports are shown and not rows."""
    return Report(name=scenario, status=Status.ERROR, headline=f"The scenario could not be run: {message}")


def refused_row(scenario: str, message: str, *, exit_code: int) -> MatrixRow:
    """The row of a scenario that could not be run, with the reason."""
    return MatrixRow(
        scenario=scenario, status="refused", before="not run", cause=message, as_expected=False, exit=exit_code
    )


def not_run_row(scenario: str) -> MatrixRow:
    """The row of a scenario that Ctrl-C has left out, or ended."""
    return MatrixRow(scenario=scenario, status=NOT_RUN, before="not run", as_expected=False, exit=INTERRUPTED)


def not_run_report(scenario: str) -> Report:
    """Stands for such a scenario where reports are shown and not rows."""
    return Report(name=scenario, status=Status.UNKNOWN, headline="Not run: interrupted.")


_GRAVEST_FIRST = (ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.NO_TRACE, ExitCode.FINDINGS)


def matrix_exit(rows: Sequence[MatrixRow]) -> int:
    """0 if each scenario's exit code is 0; else the code of the gravest: usage, then a dead worker, then findings. 130 after Ctrl-C."""
    codes = {row.exit for row in rows}
    if INTERRUPTED in codes:
        return INTERRUPTED
    return next((int(code) for code in _GRAVEST_FIRST if int(code) in codes), int(ExitCode.OK))


_EXPECTED = {True: "as expected", False: "UNEXPECTED", None: "not judged"}


def in_one_line(row: MatrixRow) -> str:
    """The row as a line of progress."""
    verdict = _EXPECTED[row.as_expected]
    found = row.finding or ("could not run" if row.status == "refused" else "no finding")
    return f"{row.scenario}: {verdict} ({found}, {row.seconds:.1f} s)"


def render_matrix_json(rows: Sequence[MatrixRow], *, exit_code: int) -> str:
    """``matrix.json``: the rows, whether all are as expected, and the exit code of the whole command."""
    return json.dumps(_data(rows, exit_code), indent=2, allow_nan=False) + "\n"


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


def _as_expected(report: Report) -> bool | None:
    if report.expectation or report.expectation_met is not None:
        return report.expectation_met
    return report.status is Status.HEALTHY


def _remedies(report: Report, outcome: Outcome) -> tuple[str, ...]:
    return tuple(trial.remedy for trial in report.trials if trial.outcome is outcome)


def matrix_document(rows: Sequence[MatrixRow], reports: Sequence[Report], *, exit_code: int) -> Document:
    """All scenarios in a table, then each of which there is something to say: those that are not as expected first.

    Args:
        rows: one a scenario.
        reports: those of the scenarios, in the same order.
        exit_code: of the whole command.
    """
    ran = [row for row in rows if row.status != NOT_RUN]
    met = sum(row.as_expected is True for row in ran)
    left = f"; {len(rows) - len(ran)} not run (interrupted)" if len(ran) < len(rows) else ""
    seconds = duration(sum(row.seconds for row in rows))
    attention = sorted(zip(rows, reports, strict=True), key=lambda pair: pair[0].as_expected is not False)
    return Document(
        name="scenarios",
        headline=f"{met} of {counted(len(ran), 'scenario')} as expected, in {seconds}{left}.",
        good=met == len(rows),
        sections=(
            Section("", (Table(_HEADER, tuple(map(_cells, rows))),)),
            *(
                Section(row.scenario, _details(row, report), anchor=f"scenario-{row.scenario}")
                for row, report in attention
                if row.finding is not None or (not row.as_expected and row in ran)
            ),
        ),
        parts=tuple(map(run_document, reports)),
        data=lambda: _data(rows, exit_code),
    )


_HEADER = ("scenario", "baseline", "finding", "outcome", "as expected")


def _cells(row: MatrixRow) -> tuple[Line, ...]:
    if row.status == NOT_RUN:
        return (named(row.scenario), "not run", ABSENT, ABSENT, ABSENT)
    found = f"{row.finding}, {'proven' if row.proven else row.confidence}" if row.finding else "none"
    tried = "fixed" if row.cured_by else "not fixed" if row.not_cured_by else "no fix tried"
    after = tried if row.finding else ABSENT
    expected = (
        Words("yes", Look.GOOD)
        if row.as_expected
        else Words("NO" if row.as_expected is False else "not judged", Look.BAD)
    )
    return (named(row.scenario), _before(row), found, after, expected)


def _before(row: MatrixRow) -> str:
    if row.status == "refused":
        return "could not run"
    if row.before != "completed":
        return row.before.split(":")[0]
    if row.finding is not None and row.output_error is not None:
        return f"completes, output error {number(row.output_error)}"
    return "completes"


def _details(row: MatrixRow, report: Report) -> tuple[Block, ...]:
    cause = Paragraph(row.cause)
    if not report.findings:
        return (cause,)
    return (cause, Facts(tuple((fact.label, fact.line) for fact in ranked_facts(report) if fact.on_screen)))


def _data(rows: Sequence[MatrixRow], exit_code: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "as_expected": all(row.as_expected is not False for row in rows),
        "exit": exit_code,
        "seconds": sum(row.seconds for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def read_matrix(folder: Path) -> tuple[list[MatrixRow], list[Report]] | None:
    """The matrix that several scenarios have left in ``folder``, and their reports in its order; None where there is none.

    Raises:
        UsageError: it, or a report that it names, cannot be read.
    """
    path = folder / MATRIX_JSON
    if not path.is_file():
        return None
    try:
        rows = read_matrix_json(read_file(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({reason(error)})") from error
    reports = []
    for row in rows:
        if row.report is None:
            reports.append(refused_report(row.scenario, row.cause))
            continue
        try:
            report = inside(folder, row.report)
            read_head(report, 1)  # a folder would be searched for a report of its own
        except OSError as error:
            raise UsageError(f"{path}: its report {row.report!r} cannot be read ({reason(error)})") from error
        reports.append(read_report(report))
    return rows, reports
