"""Run directories that nobody has named are unique; one that somebody has named is never written over."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtypedoctor.errors import UsageError
from dtypedoctor.runner.directories import new_directory

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
