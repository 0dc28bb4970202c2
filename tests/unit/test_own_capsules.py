"""Whose capsule it is: what exec has marked is replayed without a question, and nothing else."""

from pathlib import Path

import pytest

from dtypedoctor.replay.own import is_own, mark_as_own


@pytest.fixture
def capsule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A capsule's folder, and a home of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "capsule").mkdir()
    (tmp_path / "capsule" / "capsule.json").write_text('{"source": "class Net: ..."}')
    return tmp_path / "capsule"


def test_a_capsule_is_ones_own_as_long_as_it_is_as_it_was_made(capsule: Path) -> None:
    """Wherever it is moved to; not once its text is another one."""
    assert not is_own(capsule)
    mark_as_own(capsule)
    assert is_own(capsule)
    moved = capsule.rename(capsule.with_name("moved"))
    assert is_own(moved)
    (moved / "capsule.json").write_text('{"source": "class Net: print(1)"}')
    assert not is_own(moved)


def test_a_mark_of_another_machine_or_user_says_nothing(capsule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their key is another one; reading makes none."""
    mark_as_own(capsule)
    monkeypatch.setenv("XDG_STATE_HOME", str(capsule.with_name("elsewhere")))
    assert not is_own(capsule)
    assert not capsule.with_name("elsewhere").exists()


def test_a_key_that_others_can_read_is_none(capsule: Path, tmp_path: Path) -> None:
    """Whoever can read it can mark capsules."""
    mark_as_own(capsule)
    key = tmp_path / "state" / "dtypedoctor" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    assert not is_own(capsule)


def test_where_nothing_can_be_kept_a_capsule_is_not_marked(capsule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is reported as ever."""
    monkeypatch.setenv("XDG_STATE_HOME", str(capsule / "capsule.json"))
    mark_as_own(capsule)
    assert not is_own(capsule)
