"""Run directories that nobody has named are unique; one that somebody has named is never written over."""

import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtypedoctor.errors import UsageError
from dtypedoctor.runner.directories import new_directory, new_record

AT_ONCE = 12


def test_runs_that_start_in_the_same_second_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them exists, and no two are the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    with ThreadPoolExecutor(AT_ONCE) as together:
        made = list(together.map(lambda _: new_directory(None, "llama"), range(AT_ONCE)))
    assert len(set(made)) == AT_ONCE
    assert all(path.is_dir() and path.name.startswith("llama-20260101-000000") for path in made)


def test_a_directory_with_a_name_is_refused_where_it_exists(tmp_path: Path) -> None:
    """What lies there stays as it is."""
    (tmp_path / "kept").write_text("1")
    with pytest.raises(UsageError, match="already exists"):
        new_directory(tmp_path, "llama")
    assert (tmp_path / "kept").read_text() == "1"


def test_a_place_where_nothing_can_be_created_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not tried again under other names for ever."""
    (tmp_path / "runs").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cannot be created"):
        new_directory(None, "llama")
    with pytest.raises(UsageError, match="cannot be created"):
        new_record(None, "llama")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a program; temporary files go to ``elsewhere`` beside it."""
    folder, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DTYPEDOCTOR_RUNS", raising=False)
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    return folder


@pytest.mark.parametrize("out", [None, Path("results/mine")], ids=["unnamed", "named"])
def test_a_run_is_recorded_elsewhere_and_then_moved_to_where_it_was_asked_for(out: Path | None, work: Path) -> None:
    """Until then the working directory is empty; two runs of the same second get two directories."""
    first, second = new_record(out, "work"), new_record(None, "work")
    assert first.private.parent == second.private.parent == work.parent / "elsewhere"
    assert stat.S_IMODE(first.private.stat().st_mode) == 0o700
    for folder in (first, second):
        (folder.private / "before").mkdir()
        (folder.private / "before" / "kept").write_text("")
    assert not list(work.iterdir())
    first.arrive()
    second.arrive()
    assert first.directory != second.directory
    assert (first.directory / "before" / "kept").exists()
    assert (second.directory / "before" / "kept").exists()
    assert not list((work.parent / "elsewhere").iterdir())


@pytest.mark.parametrize("script", ["work", "elsewhere"])
def test_a_run_is_recorded_in_no_folder_of_the_program(
    script: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither below its working directory nor below that of its script, wherever temporary files are to go."""
    folder = work.parent / script
    monkeypatch.setenv("TMPDIR", str(folder))
    record = new_record(None, "work", folder)
    assert not record.private.is_relative_to(folder)
    record.private.rmdir()


def test_a_record_goes_to_another_disk_as_a_whole(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied and then renamed, and nothing of it stays behind."""
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    record = new_record(None, "to-another-disk")
    assert record.private.parent == Path("/dev/shm")
    (record.private / "before").mkdir()
    (record.private / "before" / "kept").write_text("1")
    (record.private / "report.md").write_text("2")
    record.arrive()
    assert {path.name for path in record.directory.iterdir()} == {"before", "report.md"}
    assert (record.directory / "before" / "kept").read_text() == "1"
    assert not record.private.exists()


def test_a_record_lies_beside_what_the_program_has_made_of_its_directory(work: Path) -> None:
    """In it where nothing of that name is there; else in one with a number."""
    for made, expected in (("checkpoint", "out"), ("before", "out-1")):
        record = new_record(work / made / "out", "work")
        (record.private / "before").mkdir()
        (record.directory / made).mkdir(parents=True)
        record.arrive()
        assert record.directory == work / made / expected
        assert (record.directory / "before").is_dir()


@pytest.mark.parametrize(
    "make", [lambda runs: runs.write_text(""), lambda runs: runs.symlink_to("nowhere")], ids=["file", "link"]
)
def test_a_record_stays_where_it_is_if_it_cannot_be_moved(
    make: Callable[[Path], object], work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program has made a file, or a link to nothing, of ``runs``: that costs no record, and it is said where it lies."""
    record = new_record(None, "stays")
    (record.private / "before").mkdir()
    make(work / "runs")
    record.arrive()
    assert record.directory == record.private
    assert (record.private / "before").is_dir()
    assert f"the run stays in {record.private}" in capsys.readouterr().err


def test_a_record_arrives_where_it_was_asked_for_though_the_program_has_moved(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What watches itself from inside may change its working directory; a relative name means what it meant at the start."""
    record = new_record(Path("mine"), "work")
    (record.private / "before").mkdir()
    monkeypatch.chdir(work.parent)
    record.arrive()
    assert record.directory == work / "mine"
    assert (work / "mine" / "before").is_dir()


def test_a_record_is_made_though_the_working_directory_is_gone(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python runs a program there: it is recorded, and where the record cannot lie where it was asked for, it stays."""
    work.rmdir()
    named, relative = new_record(work.parent / "mine", "work"), new_record(None, "work")
    for record in (named, relative):
        (record.private / "before").mkdir()
        record.arrive()
    assert (work.parent / "mine" / "before").is_dir()
    assert relative.directory == relative.private
    assert f"the run stays in {relative.private}" in capsys.readouterr().err
