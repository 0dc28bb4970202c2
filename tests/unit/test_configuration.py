"""``[tool.dtypedoctor]``: which file, which keys, and that the command line wins."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtypedoctor.cli.main import KEYS, RUNS_VARIABLE, _options_of, with_project_defaults
from dtypedoctor.errors import UsageError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a project, two folders above the working directory."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    monkeypatch.setenv(RUNS_VARIABLE, "")
    monkeypatch.delenv(RUNS_VARIABLE)
    return tmp_path / "pyproject.toml"


def completed(*words: str) -> Sequence[str]:
    """The command line with the defaults."""
    return with_project_defaults(words, _options_of)


def test_options_of_the_verb_come_before_what_was_typed(project: Path) -> None:
    """So what was typed wins; options that the verb has not are left out."""
    project.write_text("[tool.dtypedoctor]\ncapsule-limit = 128\npropagate-exit = true\ndevice = 'cpu'\n")
    assert completed("exec", "--capsule-limit", "1", "a.py") == [
        "exec", "--capsule-limit=128", "--propagate-exit", "--capsule-limit", "1", "a.py"
    ]  # fmt: skip
    assert completed("run", "x") == ["run", "--device=cpu", "x"]
    assert completed("explain", "x") == ["explain", "x"]
    assert completed("no-such-verb") == ["no-such-verb"]
    assert completed() == []


def test_options_that_exclude_each_other_are_not_joined(project: Path) -> None:
    """`--overhead-budget` in the file gives way to `--every-n-steps` on the command line."""
    project.write_text("[tool.dtypedoctor]\noverhead-budget = '5%'\n")
    assert completed("exec", "a.py") == ["exec", "--overhead-budget=5%", "a.py"]
    assert completed("exec", "--every-n-steps=4", "a.py") == ["exec", "--every-n-steps=4", "a.py"]
    assert completed("exec", "--every_n_steps", "4", "a.py") == ["exec", "--every_n_steps", "4", "a.py"]
    assert completed("exec", "a.py", "--resume") == ["exec", "--overhead-budget=5%", "a.py", "--resume"]


@pytest.mark.parametrize("words", [("bisect", "--resume", "RUN"), ("--help",)])
def test_no_default_stands_beside_an_option_that_excludes_it(words: tuple[str, ...], project: Path) -> None:
    """A bisection goes on with its own options."""
    project.write_text("[tool.dtypedoctor]\nformat = 'json'\ndevice = 'cpu'\n")
    assert completed(*words) == list(words)


def test_the_folder_of_runs_is_relative_to_the_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a variable of the environment wins over it."""
    from dtypedoctor.runner.directories import new_directory

    project.write_text("[tool.dtypedoctor]\nruns = 'records'\n")
    completed("run", "x")
    assert new_directory(None, "x").parent == project.parent / "records"
    monkeypatch.setenv(RUNS_VARIABLE, "elsewhere")
    completed("run", "x")
    assert new_directory(None, "x").parent == Path("elsewhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("capsul-limit = 1", "unknown key 'capsul-limit'; did you mean 'capsule-limit'?"),
        ("allow-code = true", "unknown key 'allow-code'"),
        ("capsule-limit = [1]", "capsule-limit must be text or a number, got [1]"),
        ("capsule-limit = true", "capsule-limit must be text or a number, got True"),
        ("propagate-exit = 'yes'", "propagate-exit must be true or false, got 'yes'"),
        ("runs = 5", "runs must be text, got 5"),
        ("capsule-limit = ", "cannot be read: Invalid value"),
        (f"capsule-limit = {'[' * 100_000}", "cannot be read: nested too deep"),
        (f"capsule-limit = {'9' * 900_000}", "cannot be read: "),
        (f"# {'x' * (1 << 20)}", "larger than 1 MiB"),
        (r'runs = "\u0000"', "runs must be text"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, message: str, project: Path) -> None:
    """With the file's path, and for a slip of the pen the key that was meant."""
    project.write_text(f"[tool.dtypedoctor]\n{text}\n")
    with pytest.raises(UsageError) as refused:
        completed("exec", "a.py")
    assert str(project) in refused.value.message
    assert message in refused.value.message


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "sparse"])
def test_what_is_no_file_of_settings_is_passed_over(kind: str, project: Path) -> None:
    """A pipe that nobody writes to, a link to a device without an end, a folder, a terabyte without the table."""
    if kind == "sparse":
        with project.open("wb") as file:
            file.truncate(1 << 40)
    else:
        {
            "pipe": lambda: os.mkfifo(project),
            "device": lambda: project.symlink_to("/dev/zero"),
            "folder": project.mkdir,
        }[kind]()
    assert completed("exec", "a.py") == ["exec", "a.py"]


def test_other_projects_are_not_read(project: Path) -> None:
    """A file without the table is nobody's business, broken or not."""
    project.write_text("[tool.ruff\n")
    assert completed("exec", "a.py") == ["exec", "a.py"]
    project.write_text("# [tool.dtypedoctor] is not used here\n[project]\nname = 'x'\n")
    assert completed("exec", "a.py") == ["exec", "a.py"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_not_read(project: Path) -> None:
    """Anybody can leave one in ``/tmp``. That of the working directory's owner counts: a checkout that a container mounts."""
    project.write_text("[tool.dtypedoctor]\ncapsule-limit = 1\n")
    os.chown(project, 12345, -1)
    assert completed("exec", "a.py") == ["exec", "a.py"]
    os.chown(Path.cwd(), 12345, -1)
    assert completed("exec", "a.py") == ["exec", "--capsule-limit=1", "a.py"]


def test_a_directory_that_was_removed_has_no_project(project: Path) -> None:
    """What is printed needs none."""
    Path.cwd().rmdir()
    assert completed("explain", "x") == ["explain", "x"]


def test_every_key_is_an_option_of_some_verb() -> None:
    """A key that nothing reads would be a promise."""
    options = {option for verb in ("run", "exec", "bisect", "replay", "report") for option in _options_of(verb)}
    assert {f"--{key}" for key in KEYS} <= options
