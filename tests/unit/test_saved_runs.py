"""Opening runs that lie on disk."""

import json
import os
from pathlib import Path

import pytest
from report_builders import healthy, overflow

from dtypedoctor.errors import EmptyTraceError, ExitCode, UsageError
from dtypedoctor.report.build import write_report
from dtypedoctor.report.files import newest_runs, runs_document
from dtypedoctor.runner.run import open_run
from dtypedoctor.trace.events import End, Header
from dtypedoctor.trace.writer import TraceWriter


def left(directory: Path, *records: object, request: object = None, ended: object = None) -> Path:
    """A run as a worker leaves it."""
    directory.mkdir(parents=True)
    writer = TraceWriter(directory)
    for record in records or (Header(), End(n=1, outcome="completed", steps_completed=3)):
        writer.write(record)
    writer.close()
    for name, content in (("request.json", request), ("exit.json", ended)):
        if content is not None:
            (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def refused(place: Path) -> UsageError:
    with pytest.raises(UsageError) as error:
        open_run(place)
    assert error.value.exit_code is ExitCode.USAGE
    return error.value


def test_what_was_asked_and_how_it_ended_are_read_where_they_are_there(tmp_path: Path) -> None:
    """The request, the exit status, and whether it was a user's script."""
    scenario = {"name": "x", "steps": [{"workload": {"kind": "script", "path": "t.py"}}]}
    ended = {"code": -9, "timed_out": False, "seconds": 2.5}
    opened = open_run(left(tmp_path / "run", request={"scenario": scenario}, ended=ended))
    assert opened.request["scenario"] == scenario
    assert (opened.run.exit.code, opened.run.foreign) == (-9, True)


@pytest.mark.parametrize("content", ["{", "[]", "7", '{"code": "x", "timed_out": 1, "seconds": 1}', "[" * 100_000])
def test_what_lies_beside_a_trace_is_never_needed(tmp_path: Path, content: str) -> None:
    """A broken request or exit file costs its content and nothing else."""
    opened = open_run(left(tmp_path / "run", request=content, ended=content))
    assert opened.run.trace.end is not None
    assert (opened.run.exit.code, opened.run.foreign) == (0, False)


def test_a_place_without_a_trace_is_refused_with_the_runs_that_it_holds(tmp_path: Path) -> None:
    """A folder of several scenarios: the hint names what can be given."""
    for name in ("one", "two"):
        left(tmp_path / name / "before")
    error = refused(tmp_path)
    assert "no trace here" in error.message
    assert str(tmp_path / "one" / "before") in error.hint


def test_an_empty_directory_a_file_and_nothing_at_all_are_refused(tmp_path: Path) -> None:
    """Each says what to give instead."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for place in ("file", "empty"):
        assert "no trace here" in refused(tmp_path / place).message
    error = refused(tmp_path / "nowhere")
    assert "no such directory" in error.message
    assert "run has left" in error.hint


def test_a_trace_without_a_whole_record_is_that_of_a_dead_worker(tmp_path: Path) -> None:
    """A file of no bytes, or of half a line, says nothing about a run: exit 3, and where to look."""
    for name, content in (("none", ""), ("half", '{"e":"hea'), ("noise", "\x00\xff\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(content, encoding="latin-1")
        (tmp_path / name / "stderr.txt").write_text("Killed\n")
        with pytest.raises(EmptyTraceError) as error:
            open_run(tmp_path / name)
        assert error.value.exit_code is ExitCode.NO_TRACE
        assert "died before it wrote anything" in error.value.message
        assert str(tmp_path / name / "stderr.txt") in error.value.hint


def test_a_run_that_left_its_request_and_no_trace_died_too(tmp_path: Path) -> None:
    """The worker did not get as far as opening the file."""
    (tmp_path / "run" / "before").mkdir(parents=True)
    (tmp_path / "run" / "before" / "request.json").write_text("{}")
    with pytest.raises(EmptyTraceError):
        open_run(tmp_path / "run")


def test_a_folder_of_runs_lists_the_newest_first(tmp_path: Path) -> None:
    """With status and headline; what is no report is left out, and a run directory is none of them."""
    for age, report in enumerate((overflow(), healthy())):
        place = tmp_path / "runs" / report.name
        place.mkdir(parents=True)
        write_report(place, report)
        os.utime(place / "report.json", (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "report.json").write_text("{}")
    listed = newest_runs(tmp_path / "runs")
    assert [place.name for place, _ in listed] == ["gemma4_grpo_fp16", "gemma4_grpo_bf16"]
    assert newest_runs(tmp_path / "runs" / "gemma4_grpo_bf16") == []
    shown = runs_document(tmp_path / "runs", listed)
    assert [run["status"] for run in shown.data()["runs"]] == ["findings", "healthy"]
