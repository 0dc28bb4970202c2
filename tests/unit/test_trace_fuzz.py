"""Whatever happens to the files of a run, reading, diagnosing and reporting it ends soon, with a report or with a UsageError."""

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_mutations import healthy, mutated, overflowing

from dtypedoctor.cli.reported import exit_code
from dtypedoctor.diagnosis.rule import Confidence, Severity
from dtypedoctor.errors import EmptyTraceError, ExitCode, UsageError
from dtypedoctor.report.files import report_of
from dtypedoctor.report.formats import FORMATS, format_named
from dtypedoctor.report.run_document import public_run
from dtypedoctor.report.to_json import Report, Status, from_json
from dtypedoctor.trace.reader import read_trace

SOME, MANY = 40, 2700
SEEDS = st.integers(0, 2**48)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An intact run of each kind."""
    found = {}
    for make in (healthy, overflowing):
        found[make.__name__] = tmp_path_factory.mktemp(make.__name__)
        make(found[make.__name__])
    return found


def reported(intact: Path, seed: int) -> tuple[str, Report | UsageError]:
    """The report of a mutated copy of a run in every format, or why there is none."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(intact, copy)
        how = mutated(copy, seed)
        try:
            report: Report | UsageError = report_of(copy)
        except UsageError as refused:
            report = refused
        if isinstance(report, Report):
            says_so_in_every_format(report)
        return how, report


def says_so_in_every_format(report: Report) -> None:
    """Each format can be read by what reads it, and holds what was found."""
    written = {style: format_named(style).render(public_run(report)) for style in (one.name for one in FORMATS)}
    assert [f.id for f in from_json(written.pop("json")).findings] == [f.id for f in report.findings]
    for style, text in written.items():
        assert all(f.id in text for f in report.findings), style
    ET.fromstring(written["junit"])


def ends_well(intact: Path, seed: int, *, was_healthy: bool) -> None:
    """The report is no worse than the truth: what is lost is said, and nothing is proven that was not there."""
    how, report = reported(intact, seed)
    if isinstance(report, UsageError):
        assert report.exit_code is (ExitCode.NO_TRACE if isinstance(report, EmptyTraceError) else ExitCode.USAGE)
        return
    serious = [f for f in report.findings if f.severity is not Severity.INFO]
    if was_healthy:
        assert not [f for f in serious if f.confidence is Confidence.PROVEN], how
    assert exit_code(report) in (ExitCode.OK, ExitCode.FINDINGS, ExitCode.NO_TRACE)
    if report.status is Status.HEALTHY:
        assert was_healthy, f"{how}: an overflow became a healthy run"
        assert not [line for line in report.coverage if line.startswith("trace:")], how


def test_the_intact_runs_are_what_they_are_called(runs: dict[str, Path]) -> None:
    """Without mutations one is healthy and the other has an overflow."""
    assert report_of(runs["healthy"]).status is Status.HEALTHY
    assert report_of(runs["overflowing"]).status is Status.FINDINGS


@settings(max_examples=SOME, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS)
def test_a_mutated_trace_of_a_healthy_run_proves_nothing(runs: dict[str, Path], seed: int) -> None:
    """Bytes flipped, cut and put in; records lost, doubled and moved; values of other types; other schemas."""
    ends_well(runs["healthy"], seed, was_healthy=True)


@settings(max_examples=SOME, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS)
def test_a_mutated_trace_of_an_overflow_is_never_called_healthy(runs: dict[str, Path], seed: int) -> None:
    """What is left of it may not show the overflow any more; then the report says that a part is missing."""
    ends_well(runs["overflowing"], seed, was_healthy=False)


@pytest.mark.release
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["healthy", "overflowing"])
def test_thousands_of_mutated_traces(runs: dict[str, Path], name: str) -> None:
    """5,400 traces in all, with consecutive seeds."""
    for seed in range(MANY):
        ends_well(runs[name], seed, was_healthy=name == "healthy")


def test_every_whole_record_of_a_flipped_trace_is_read(runs: dict[str, Path], tmp_path: Path) -> None:
    """A damaged line costs itself: all others are there, unchanged, and the damage is counted."""
    whole = read_trace(runs["healthy"])
    data = (runs["healthy"] / "events.jsonl").read_bytes()
    for place in range(0, len(data), 97):
        if data[place : place + 1] == b"\n":
            continue
        (tmp_path / "events.jsonl").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        trace = read_trace(tmp_path)
        lost = len(whole.records) + len(whole.samples) - len(trace.records) - len(trace.samples)
        assert lost in (0, 1) or any("described nowhere" in sentence for sentence in trace.damage)
        assert set(trace.samples) <= set(whole.samples)
        assert trace.damage or not lost  # a quotation mark of a seal may be anything
