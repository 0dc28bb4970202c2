"""Several scenarios in one directory: what comes home from a job, and the journal of those that are finished."""

import io
import json
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
from report_builders import healthy
from scenario_files import HEALTHY, written

from dtypedoctor.cli import many
from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.report.build import REPORT_JSON
from dtypedoctor.report.files import MATRIX_JSON
from dtypedoctor.report.matrix import render_matrix_json, row_of
from dtypedoctor.report.to_json import render_json
from dtypedoctor.runner.job import ASKED, HERE, OUT, PACKAGE, Ended
from dtypedoctor.runner.machines import Where
from dtypedoctor.runner.sending import packed
from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.scenario.model import Scenario


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> many.Batch:
    """The scenarios ``first`` and ``second``, of which none is finished."""
    monkeypatch.chdir(tmp_path)
    example = load_scenario(written(tmp_path, HEALTHY))
    scenarios = [example.model_copy(update={"name": name}) for name in ("first", "second")]
    return many.new_batch(tmp_path / "all", scenarios, remedies=True, wheels=None, resident=None)


def result_of(name: str) -> many.Done:
    """A scenario that is healthy."""
    report = replace(healthy(), name=name)
    return row_of(report, exit_code=0, seconds=1.0, path=f"{name}/{REPORT_JSON}"), report


def ended(*names: str) -> Ended:
    """A job that has left the results of scenarios."""
    results = [result_of(name) for name in names]
    archive = io.BytesIO()
    with ZipFile(archive, "w") as file:
        file.writestr(f"run/{MATRIX_JSON}", render_matrix_json([row for row, _ in results], exit_code=0))
        for row, report in results:
            file.writestr(f"run/{row.report}", render_json(report))
    return Ended(status=0, timed_out=False, seconds=1.0, said="the last words\n", files=archive.getvalue())


def test_folders_of_the_users_are_never_those_of_the_job(batch: many.Batch) -> None:
    """Whatever is sent along: the job runs its own scenario only, and nothing of the user's comes home as a result."""
    for name in ("scenarios", "out", "package", "run", "asked"):
        Path(name).mkdir()
        Path(name, "other.yaml").write_text(HEALTHY)
    sent = packed(
        batch.scenarios, Where(executor="ray", send=tuple(path for path in Path().iterdir() if path.is_dir()))
    )
    job = many._job(batch, batch.scenarios[0], sent)
    used = {name.partition("/")[0] for name in job.own} | {OUT, PACKAGE}
    assert {"scenarios/other.yaml", "out/other.yaml"} <= set(job.common)
    assert not used & {name.partition("/")[0] for name in job.common if not name.startswith(f"{PACKAGE}/dtypedoctor/")}
    assert all(name.startswith(word.removeprefix(HERE)) for name in job.own for word in job.command if ASKED in word)


def test_the_row_of_a_scenario_is_found_by_its_name(batch: many.Batch) -> None:
    """Not by its place."""
    row, report = many._arrived(batch, batch.scenarios[1], ended("first", "second"))
    assert (row.scenario, report.name) == ("second", "second")


@pytest.mark.parametrize("files", [b"", b"no archive", ended("first")["files"]])
def test_a_job_that_brings_no_result_of_its_scenario_is_lost(batch: many.Batch, files: bytes) -> None:
    """With what it printed last."""
    with pytest.raises(DoctorError, match="not run: dtypedoctor failed there: the last words"):
        many._arrived(batch, batch.scenarios[1], {**ended(), "files": files})


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
