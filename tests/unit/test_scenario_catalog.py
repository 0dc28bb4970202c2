"""The shipped scenarios are found, by path or by name, wherever the program was installed."""

from pathlib import Path

import pytest

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios import loading
from dtypedoctor.lab.scenarios.loading import available, resolve

REPOSITORY = Path(__file__).parents[2]


def test_a_bare_name_and_a_path_lead_to_the_same_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a checkout the path works, everywhere the name."""
    monkeypatch.chdir(REPOSITORY)
    path = resolve("scenarios/gemma4_grpo_fp16.yaml")
    assert path == Path("scenarios/gemma4_grpo_fp16.yaml")
    assert resolve("gemma4_grpo_fp16").samefile(path)


def test_a_file_of_ones_own_goes_before_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the current directory is what is meant; a directory of that name is not a scenario."""
    monkeypatch.chdir(tmp_path)
    own = Path("gemma4_grpo_fp16")
    own.mkdir()
    assert resolve(str(own)) != own
    own.rmdir()
    own.write_text("")
    assert resolve(str(own)) == own


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gemma4_grpo_pf16", "gemma4_grpo_pf16: no such file or scenario; did you mean 'gemma4_grpo_fp16'?"),
        ("scenarios/zzz.yaml", "scenarios/zzz.yaml: no such file or scenario"),
        ("", "'': no such file or scenario"),
    ],
)
def test_an_unknown_scenario_is_answered_with_the_known_ones(text: str, said: str) -> None:
    """The near name is suggested and all names are in the hint."""
    with pytest.raises(UsageError) as refused:
        resolve(text)
    assert refused.value.message == said
    assert "gemma4_grpo_bf16" in refused.value.hint


def test_what_only_opening_can_judge_is_left_to_loading(tmp_path: Path) -> None:
    """A name too long for the file system is a path like any other here."""
    long = str(tmp_path / ("a" * 300))
    assert resolve(long) == Path(long)


def test_a_wheel_holds_its_scenarios_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In site-packages, a directory `scenarios` beside the package belongs to somebody else."""
    shipped = tmp_path / "dtypedoctor" / "data" / "scenarios"
    for directory in (shipped, tmp_path / "scenarios"):
        directory.mkdir(parents=True)
    (shipped / "mine.yaml").touch()
    (tmp_path / "scenarios" / "foreign.yaml").touch()
    monkeypatch.setattr(loading, "_PACKAGE", tmp_path / "dtypedoctor")
    assert available() == (shipped / "mine.yaml",)
