"""Several scenarios in one directory: what comes home from a job, and the journal of those that are finished."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_builders import healthy
from scenario_files import HEALTHY, written

from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.lab.cli import many
from dtypedoctor.lab.cli.matrix import MATRIX_JSON, render_matrix_json, row_of
from dtypedoctor.lab.runner.executors import Ended, Job, Where
from dtypedoctor.lab.scenarios.loading import load_scenario
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.report.build import REPORT_JSON
from dtypedoctor.report.to_json import render_json


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> many.Batch:
    """The scenarios ``first`` and ``second``, of which none is finished."""
    monkeypatch.chdir(tmp_path)
    example = load_scenario(written(tmp_path, HEALTHY))
    scenarios = [example.model_copy(update={"name": name}) for name in ("first", "second")]
    return many.new_batch(tmp_path / "all", scenarios, remedies=True, wheels=None)


def result_of(name: str) -> many.Done:
    report = replace(healthy(), name=name)
    return row_of(report, exit_code=0, seconds=1.0, path=f"{name}/{REPORT_JSON}"), report


ENDED = Ended(status=0, timed_out=False, seconds=1.0)


def job_with(batch: many.Batch, *names: str) -> Job:
    """The job of the second scenario, after a command that has left the results of these."""
    job = many._job(batch, batch.scenarios[1])
    job.log.write_text("one line\nthe last words\n")
    results = [result_of(name) for name in names]
    for row, report in results:
        place = job.log.parent / "run" / str(row.report)
        place.parent.mkdir(parents=True)
        place.write_text(render_json(report))
    if results:
        (job.log.parent / "run" / MATRIX_JSON).write_text(render_matrix_json([row for row, _ in results], exit_code=0))
    return job


def test_the_results_of_a_job_are_moved_to_the_directory_of_its_scenario(batch: many.Batch) -> None:
    """Its row is found by name, not by its place; nothing is left in the folder of the job."""
    job = job_with(batch, "first", "second")
    row, report = many._arrived(batch, job, ENDED)
    assert (row.scenario, report.name) == ("second", "second")
    assert (batch.directory / "second" / REPORT_JSON).is_file()
    assert not job.log.parent.exists()


@pytest.mark.parametrize("left", [(), ("first",)], ids=["nothing", "another scenario"])
def test_a_job_that_leaves_no_result_of_its_scenario_is_told_with_what_it_printed_last(
    batch: many.Batch, left: tuple[str, ...]
) -> None:
    """And with the file that holds the rest."""
    job = job_with(batch, *left)
    with pytest.raises(DoctorError, match="not run: dtypedoctor failed there: the last words") as failed:
        many._arrived(batch, job, ENDED)
    assert str(job.log) in failed.value.hint


def test_a_job_that_was_stopped_at_its_time_limit_says_so(batch: many.Batch) -> None:
    """It is no failure of the scenario."""
    with pytest.raises(UsageError, match="stopped after 7 s"):
        many._arrived(batch, job_with(batch, "second"), replace(ENDED, timed_out=True, seconds=7.0))


@pytest.fixture
def treated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scenarios that were run, in their order; they are healthy and take no time."""
    names: list[str] = []

    def treat(batch: many.Batch, scenario: Scenario, _: object) -> many.Done:
        names.append(scenario.name)
        result = result_of(scenario.name)
        place = batch.directory / scenario.name
        place.mkdir()
        (place / REPORT_JSON).write_text(render_json(result[1]))
        return result

    monkeypatch.setattr(many, "_treated", treat)
    return names


@pytest.mark.parametrize(
    "torn", [b'{"scenario":"second","sta', b'{"scenario":"second"}', b"[1]\n", b"\xff\x00\n", b"{}"]
)
def test_a_torn_line_of_the_journal_costs_its_scenario_only(batch: many.Batch, treated: list[str], torn: bytes) -> None:
    """Also when the next rows are written behind it."""
    journal = batch.directory / many.JOURNAL
    asked = journal.read_bytes()
    many.treat_all(batch, Where())
    first = journal.read_bytes().removeprefix(asked).splitlines(keepends=True)[0]
    journal.write_bytes(asked + first + torn)
    for expected in (["second"], []):
        treated.clear()
        rows, _ = many.treat_all(many.resumed_batch(batch.directory, allow_code=True), Where())
        assert [row.scenario for row in rows] == ["first", "second"]
        assert treated == expected


def test_a_broken_report_is_named_and_its_scenario_runs_again(
    batch: many.Batch, treated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are not lost with it."""
    many.treat_all(batch, Where())
    broken = batch.directory / "first" / REPORT_JSON
    broken.write_text("{")
    treated.clear()
    rows, _ = many.treat_all(many.resumed_batch(batch.directory, allow_code=True), Where())
    assert treated == ["first"]
    assert len(rows) == 2
    assert f"{broken}: not a report" in capsys.readouterr().err


def test_a_journal_that_names_no_scenarios_is_refused(batch: many.Batch) -> None:
    """There is nothing to resume."""
    journal = batch.directory / many.JOURNAL
    journal.write_text(json.dumps({**json.loads(journal.read_text()), "scenarios": []}) + "\n")
    with pytest.raises(UsageError, match="no scenarios to resume here"):
        many.resumed_batch(batch.directory, allow_code=True)
