"""Run directories that nobody has named are unique; one that somebody has named is never written over."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtypedoctor.errors import UsageError
from dtypedoctor.runner.directories import appear, hidden_directory, new_directory

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
        hidden_directory(None, "llama")


def test_a_run_without_a_name_is_hidden_beside_the_folder_of_runs_and_then_appears_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then there is neither ``runs`` nor anything in it; a second run gets a name of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DTYPEDOCTOR_RUNS", raising=False)
    (first, hidden), (second, other) = hidden_directory(None, "work"), hidden_directory(None, "work")
    assert hidden is not None
    assert other is not None
    assert first != second
    assert not Path("runs").exists()
    assert {path.name for path in tmp_path.iterdir()} == {hidden.name, other.name}
    (hidden / "kept").write_text("")
    assert appear(hidden, first) == first
    assert (first / "kept").exists()
    assert not hidden.exists()


@pytest.mark.parametrize(
    "make", [lambda runs: runs.write_text(""), lambda runs: runs.symlink_to("/dev/shm")], ids=["file", "link"]
)
def test_a_run_stays_hidden_where_the_program_has_made_something_else_of_the_folder_of_runs(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, or a link to another disk, of that name costs no record, and nothing is left in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DTYPEDOCTOR_RUNS", raising=False)
    directory, hidden = hidden_directory(None, "stays-hidden")
    assert hidden is not None
    make(tmp_path / "runs")
    assert appear(hidden, directory) == hidden
    assert hidden.is_dir()
    assert not directory.exists()


def test_a_run_is_recorded_in_its_place_where_the_folder_of_runs_is_on_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be moved there at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DTYPEDOCTOR_RUNS", raising=False)
    (tmp_path / "runs").symlink_to("/dev/shm")
    directory, hidden = hidden_directory(None, "in-its-place")
    try:
        assert hidden is None
        assert directory.is_dir()
    finally:
        directory.rmdir()
