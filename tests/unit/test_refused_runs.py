"""Runs that cannot be made: the first refuses the whole treatment, later ones are a line in it, and nothing of others is removed."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.errors import DoctorError, UsageError, WorkerDiedError
from dtypedoctor.lab.scenarios.model import Request, Scenario
from dtypedoctor.lab.trials import treatment as treatment_module
from dtypedoctor.lab.trials.treatment import Plan, treat
from dtypedoctor.report.build import build_report
from dtypedoctor.runner.directories import clear, remove_unused
from dtypedoctor.runner.run import Run, WorkerExit
from dtypedoctor.trace.events import Header, Refused
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.writer import TraceWriter

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from recorded import run_directory

OVERFLOW = Scenario.model_validate(
    {
        "name": "overflow",
        "summary": "It overflows.",
        "steps": [
            {"model": {"name": "builtin:llama-tiny", "dtype": "float16"}, "workload": {"kind": "forward", "steps": 14}}
        ],
        "reference": {"dtype": "bfloat16"},
        "remedies": ["bfloat16"],
    }
)


def first_only(directory: Path, refusal: Exception) -> Callable[[str, Request], Run]:
    """A run that overflows under the label ``before``; every other one is refused."""

    def run(label: str, request: Request) -> Run:
        if label != "before":
            raise refusal
        trace = read_trace(directory / "before")
        return Run(trace=trace, exit=WorkerExit(code=1, timed_out=False, seconds=1.0), directory=directory / "before")

    return run


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    "refusal",
    [UsageError("the model is gone"), WorkerDiedError("the model is gone"), OSError(28, "the model is gone")],
    ids=lambda refusal: type(refusal).__name__,
)
def test_no_later_refusal_costs_the_diagnosis_of_the_first_run(refusal: DoctorError | OSError, tmp_path: Path) -> None:
    """Uninstrumented run, reference, float32 reference and every fix are refused; the report says so of each."""
    treatment = treat(OVERFLOW, first_only(run_directory("gemma4_grpo_fp16", tmp_path), refusal))
    report = build_report(treatment, command="", files={}, next_command="")
    assert [finding.id for finding in report.findings] == ["float16-overflow"]
    for label in ("unwatched", "reference", "float32-twin"):
        assert f"the run {label!r} could not be made: the model is gone" in report.coverage
    assert {trial.reason for trial in report.trials if trial.remedy == "bfloat16"} == {"the model is gone"}
    assert report.observer.bitwise_equal is None


@pytest.mark.parametrize("refusal", [UsageError("no such file"), OSError(28, "No space left on device")])
def test_a_first_run_that_cannot_be_made_refuses_the_treatment(refusal: Exception) -> None:
    """There is nothing to report then."""

    def run(label: str, request: Request) -> Run:
        raise refusal

    with pytest.raises(UsageError, match=r"no such file|No space left on device"):
        treat(OVERFLOW, run)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("code", "timed_out", "said"),
    [(-9, False, "was killed by SIGKILL"), (-9, True, "at its time limit"), (-6, False, "SIGABRT")],
)
def test_a_strangers_call_that_had_to_be_stopped_is_not_made_again(
    code: int, timed_out: bool, said: str, tmp_path: Path
) -> None:
    """No fix is tried on it, and the error says what to do; where it is trusted, there is a report."""
    directory = run_directory("gemma4_grpo_fp16", tmp_path) / "before"
    labels: list[str] = []

    def run(label: str, request: Request) -> Run:
        labels.append(label)
        ended = WorkerExit(code=code, timed_out=timed_out, seconds=60.0)
        return Run(trace=read_trace(directory), exit=ended, directory=directory)

    model = {"name": "capsule:/anywhere", "dtype": "float16"}
    step = {"model": model, "workload": {"kind": "plugin", "name": "capsule-call"}}
    replay = Scenario.model_validate(
        {"name": "replay", "summary": "A call.", "steps": [step], "remedies": ["bfloat16"]}
    )
    with pytest.raises(UsageError, match=said) as refusal:
        treat(replay, run)
    assert labels == ["before"]
    assert "--allow-code" in (refusal.value.hint or "")
    step["model"] = model | {"options": {"allow_code": True}}
    trusted = replay.model_validate(replay.model_dump() | {"steps": [step]})
    assert treat(trusted, run, Plan(certify=False, remedies=False)).findings


def refused(directory: Path) -> Path:
    """A run directory in which the worker said that there is nothing to run."""
    directory.joinpath("before").mkdir(parents=True)
    writer = TraceWriter(directory / "before")
    writer.write(Header(created=1.0, pid=1))
    writer.write(Refused(message="no such script"))
    writer.close()
    for name in ("server.log", "before/request.json", "before/stdout.txt", "before/exit.json"):
        (directory / name).write_text("")
    return directory


def test_a_directory_in_which_nothing_was_run_is_taken_away(tmp_path: Path) -> None:
    """All that lies in it was made by the command that was refused."""
    remove_unused(refused(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_the_doctor_did_not_make_is_never_removed(tmp_path: Path) -> None:
    """Its folders stay with it, and links are not followed out of the directory."""
    directory, elsewhere = refused(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "stdout.txt").write_text("mine")
    (directory / "link").symlink_to(elsewhere)
    (directory / "before" / "ckpt").mkdir()
    (directory / "before" / "ckpt" / "checkpoint.pt").write_text("weights")
    remove_unused(directory)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir())
    assert left == ["elsewhere/stdout.txt", "run/before/ckpt/checkpoint.pt"]
    assert (directory / "link").is_symlink()


@pytest.mark.parametrize("records", [0, 1])
def test_a_directory_that_holds_a_run_is_left_as_it_is(records: int, tmp_path: Path) -> None:
    """However that run ended, before its first record even."""
    directory = refused(tmp_path / "run")
    (directory / "unwatched").mkdir()
    writer = TraceWriter(directory / "unwatched")
    if records:
        writer.write(Header(created=1.0, pid=1))
    writer.close()
    before = sorted(directory.rglob("*"))
    remove_unused(directory)
    assert sorted(directory.rglob("*")) == before


def test_what_an_interruption_has_left_makes_room_and_strangers_files_are_set_aside(tmp_path: Path) -> None:
    """The place is free afterwards; a file of the user's lies in a directory beside it."""
    place = refused(tmp_path / "run") / "before"
    clear(place)
    assert not place.exists()
    for number in (1, 2):
        place.mkdir()
        (place / "mine.txt").write_text(str(number))
        (place / "request.json").write_text("")
        clear(place)
        assert not place.exists()
        assert [path.name for path in (tmp_path / "run" / f"before.kept-{number}").iterdir()] == ["mine.txt"]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("finding", "steps"), [("float16-overflow", 1), ("router-flip", None)])
def test_fixes_are_looked_at_for_what_stays_finite_as_long_as_that_is_what_failed(
    finding: str, steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a failure that is seen at once the later runs look at the operators of their first step alone, which is where most of their time went."""
    directory = run_directory("gemma4_grpo_fp16", tmp_path)
    looked_at: dict[str, int | None] = {}

    def run(label: str, request: Request) -> Run:
        looked_at[label] = request.look_steps
        place = directory / ("before" if label == "before" else "remedy-bfloat16")
        return Run(trace=read_trace(place), exit=WorkerExit(code=0, timed_out=False, seconds=1.0), directory=place)

    findings = (replace(diagnose(read_trace(directory / "before"))[0], id=finding, remedies=("bfloat16",)),)
    monkeypatch.setattr(treatment_module, "findings_of", lambda *_: findings)
    treat(OVERFLOW, run)
    assert looked_at == {
        "before": None,
        "unwatched": None,
        "reference": steps,
        "float32-twin": None,
        "remedy-bfloat16": steps,
    }
