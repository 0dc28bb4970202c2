"""The matrix of several scenarios."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_builders import healthy, overflow
from rich.console import Console
from scenario_files import HEALTHY, written

from dtypedoctor.lab.cli import many
from dtypedoctor.lab.cli.matrix import (
    MatrixRow,
    matrix_document,
    matrix_exit,
    refused_report,
    refused_row,
    row_of,
)
from dtypedoctor.lab.runner.executors import Where
from dtypedoctor.lab.scenarios.loading import load_scenario
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.report.to_json import Report, Status
from dtypedoctor.report.to_terminal import print_document
from dtypedoctor.text import counted


def rows() -> list[MatrixRow]:
    """A cured failure, a healthy run, and a scenario that could not be run."""
    cured = replace(overflow(), expectation_met=True)
    return [
        row_of(cured, exit_code=0, seconds=12.5, path="gemma4_grpo_fp16/report.json"),
        row_of(healthy(), exit_code=0, seconds=3.0, path="gemma4_grpo_bf16/report.json"),
        refused_row("needs_cuda", "this scenario needs a CUDA device and there is none", exit_code=2),
    ]


def printed(width: int = 100, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    reports = [overflow(), healthy(), refused_report("needs_cuda", "there is no CUDA device")]
    document = matrix_document(rows(), reports, exit_code=2)
    print_document(document, Console(file=file, width=width, no_color=True, legacy_windows=False))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_a_healthy_scenario_is_as_expected_without_an_expectation() -> None:
    """Nothing was announced and nothing was found."""
    row = rows()[1]
    assert (row.finding, row.findings, row.cured_by, row.as_expected) == (None, (), (), True)


def test_an_expectation_that_was_not_met_is_not_as_expected() -> None:
    """Whatever the status is."""
    row = row_of(replace(healthy(), expectation_met=False), exit_code=10, seconds=1.0, path="x/report.json")
    assert not row.as_expected


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_names_findings_causes_and_remedies(width: int) -> None:
    """A line per scenario, a block per failure, and how many are as they say."""
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    assert "gemma4_grpo_bf16" in text
    assert "fixed by " in text
    assert "2 of 3 scenarios as expected, in 15.5 s." in text
    assert "could not run" in text
    assert "needs a CUDA device" in text


@pytest.mark.parametrize("done", [0, 1, 2])
def test_scenarios_that_ctrl_c_has_left_out_are_not_run(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count neither as expected nor as unexpected; without any result nothing is left where the next run may go."""
    directory = tmp_path / "out"

    def treated(_: Any, scenario: Scenario, __: Any) -> tuple[MatrixRow, Report]:
        (directory / scenario.name).mkdir(parents=True)
        (directory / scenario.name / "server.log").touch()
        if scenario.name == f"scenario-{done}":
            raise KeyboardInterrupt
        report = replace(healthy(), name=scenario.name)
        return row_of(report, exit_code=0, seconds=1.0, path="report.json"), report

    monkeypatch.setattr(many, "_treated", treated)
    example = load_scenario(written(tmp_path, HEALTHY))
    scenarios = [example.model_copy(update={"name": f"scenario-{number}"}) for number in range(3)]
    batch = many.new_batch(directory, scenarios, remedies=True, wheels=None)
    if not done:
        with pytest.raises(KeyboardInterrupt):
            many.treat_all(batch, Where())
        assert not directory.exists()
        return
    found, reports = many.treat_all(batch, Where())
    assert [row.before for row in found[done:]] == ["not run"] * (3 - done)
    assert [report.status is Status.HEALTHY for report in reports] == [number < done for number in range(3)]
    assert matrix_exit(found) == 130
    headline = matrix_document(found, reports, exit_code=130).headline
    assert f"{done} of {counted(done, 'scenario')} as expected" in headline
    assert f"{3 - done} not run" in headline
