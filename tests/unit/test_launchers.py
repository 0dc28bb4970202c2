"""Launchers and interpreters in front of a script are told from it."""

import sys
from pathlib import Path

import pytest

from dtypedoctor.cli.launchers import Launch, taken_apart
from dtypedoctor.errors import UsageError

TORCHRUN, ACCELERATE = "torch.distributed.run", "accelerate.commands.launch"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "-x"], Launch(script="train.py", arguments=("-x",))),
        (["long" * 100, "-x"], Launch(script="long" * 100, arguments=("-x",))),
        (["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"], Launch(launcher=(TORCHRUN, "--nproc-per-node", "2"), script="train.py", arguments=("--lr", "1"))),
        (["/somewhere/bin/torchrun", "train.py"], Launch(launcher=(TORCHRUN,), script="train.py", arguments=())),
        (["torchrun", "--standalone", "-m", "package.train", "-m"], Launch(launcher=(TORCHRUN, "--standalone"), script="package.train", arguments=("-m",), module=True)),
        (["accelerate", "launch", "--config_file=a.yaml", "train.py"], Launch(launcher=(ACCELERATE, "--config_file=a.yaml"), script="train.py", arguments=())),
        (["deepspeed", "--num_gpus", "2", "train.py", "--deepspeed", "ds.json"], Launch(launcher=("deepspeed.launcher.runner", "--num_gpus", "2"), script="train.py", arguments=("--deepspeed", "ds.json"))),
        (["accelerate-launch", "train.py"], Launch(launcher=(ACCELERATE,), script="train.py", arguments=())),
        ([str(Path(sys.executable).parent / "python3"), "train.py", "1"], Launch(script="train.py", arguments=("1",))),
        ([str(Path(sys.executable).parent / "python3"), "-m", "a", "b"], Launch(script="a", arguments=("b",), module=True)),
        ([str(Path(sys.executable).parent / "python3"), "-m", TORCHRUN, "train.py"], Launch(launcher=(TORCHRUN,), script="train.py", arguments=())),
    ],
)  # fmt: skip
def test_the_script_and_its_launcher(words: list[str], expected: Launch) -> None:
    """Options up to the script are the launcher's, those behind it the script's."""
    assert taken_apart(words[0], words[1:], module=False, text=False) == expected


def test_a_module_that_is_a_launcher_is_one() -> None:
    """As `python -m torch.distributed.run` is; `-m` and any other module is no launcher."""
    found = taken_apart(TORCHRUN, ["--nproc-per-node=2", "train.py"], module=True, text=False)
    assert found == Launch(launcher=(TORCHRUN, "--nproc-per-node=2"), script="train.py", arguments=())
    assert taken_apart("package", ["train.py"], module=True, text=False).launcher == ()


def test_a_script_of_a_launchers_name_is_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls his script torchrun has it run."""
    monkeypatch.chdir(tmp_path)
    Path("torchrun").touch()
    assert taken_apart("torchrun", ["train.py"], module=False, text=False).launcher == ()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["torchrun", "--nproc-per-node", "2"], "torchrun: no script"),
        (["torchrun", "--no-python", "train.py"], "torchrun --no-python: this starts no Python script"),
        (["torchrun", "-m", "--standalone", "package"], "torchrun: no module behind -m"),
        (["/usr/bin/env/../python3", "train.py"], None),
        ([str(Path(sys.executable).parent / "python3"), "-O", "train.py"], "-O: give the script without the interpreter"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_apart_is_refused(words: list[str], told: str | None) -> None:
    """With the word that it is about; a program that is not there is the script that is missing."""
    if told is None:
        assert taken_apart(words[0], words[1:], module=False, text=False).script == words[0]
        return
    with pytest.raises(UsageError) as refused:
        taken_apart(words[0], words[1:], module=False, text=False)
    assert told in str(refused.value)


def test_another_python_is_refused(tmp_path: Path) -> None:
    """Its torch would be another one; nothing of it could be watched."""
    other = tmp_path / "python3"
    other.symlink_to("/bin/true")
    with pytest.raises(UsageError, match="this is another Python than dtypedoctor's"):
        taken_apart(str(other), ["train.py"], module=False, text=False)


def test_another_release_in_the_same_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``/usr/bin`` holds several: ``python3.99 train.py`` is not run by this one."""
    for name in ("python3", "python3.99"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert taken_apart(str(tmp_path / "python3"), ["train.py"], module=False, text=False).script == "train.py"
    with pytest.raises(UsageError, match="another Python"):
        taken_apart(str(tmp_path / "python3.99"), ["train.py"], module=False, text=False)
