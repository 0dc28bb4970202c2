"""Whatever a shell can be given to run, ``dtypedoctor exec`` runs in the same way."""

import os
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from command import dtypedoctor, report_of
from patience import PATIENCE

from dtypedoctor.errors import UsageError
from dtypedoctor.runner.command import Program, program_of

OVERFLOW = """
import sys, torch
big = torch.nn.Linear(4, 4).half()
with torch.no_grad():
    big.weight.fill_(6e4)
print(sys.argv, repr(sys.stdin.read()), big(torch.ones(2, 4).half()).isfinite().any().item())
"""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("form", ["-", "-c", "archive"])
def test_the_command_line_takes_every_form_and_runs_it_again(form: str, tmp_path: Path) -> None:
    """A program that overflows is found to; the run without instrumentation has the same program and arguments."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(OVERFLOW)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    (tmp_path / "program.py").write_text(OVERFLOW)
    arguments = {"-": ["-", "a", "-c"], "-c": ["-c", OVERFLOW, "a", "-c"], "archive": ["app.pyz", "a", "-c"]}[form]
    command = [sys.executable, "-m", "dtypedoctor", "exec", "--rerun", "--out", str(tmp_path / "run"), *arguments]
    with (tmp_path / "program.py").open() as given:
        done = subprocess.run(command, stdin=given if form == "-" else subprocess.DEVNULL, cwd=tmp_path, capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=False, timeout=PATIENCE)  # fmt: skip
    name = {"-": "-", "-c": "-c", "archive": "app.pyz"}[form]
    assert done.stdout == f"{[name, 'a', '-c']} '' False\n", done.stderr
    assert done.returncode == 10
    assert report_of(tmp_path / "run")["findings"][0]["op"] == "aten.addmm.default"
    assert (tmp_path / "run" / "unwatched" / "stdout.txt").read_text() == done.stdout


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    """Exit 2 and one message, and no directory is left."""
    (tmp_path / "book.ipynb").write_text('{"cells": []}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o755)
    for arguments, message in (
        (["-c", "-m", "x"], "give either -m or -c"),
        (["none.py"], "none.py: no such script"),
        (["book.ipynb"], "jupyter nbconvert --to script book.ipynb"),
        (["./folder"], "./folder: a directory without a __main__.py"),
        (["./empty"], "./empty cannot be run here: Exec format error"),
        (["--fix", "./empty"], "a file without `#!` in its first line is run by `sh FILE`"),
    ):
        finished = dtypedoctor("exec", "--out", tmp_path / "run", *arguments, cwd=tmp_path)
        assert finished.code == 2
        assert message in finished.err
        assert "Traceback" not in finished.err
        assert not (tmp_path / "run").exists()


def test_a_command_is_what_a_shell_would_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of this environment before one of PATH; a script, a folder or an archive by this Python, though it has a program's name."""
    beside = Path(sys.executable).parent
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/bin")
    (tmp_path / "no_suffix").write_text("print(1)")
    (tmp_path / "torchrun.py").write_text("print(1)")
    (tmp_path / "run.sh").write_text("#!/bin/sh")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    python = [sys.executable]
    for words, command in (
        (["train.py", "-x"], None),
        (["no_suffix", "-x"], [*python, "no_suffix", "-x"]),
        (["app"], [*python, "app"]),
        (["torchrun.py"], [*python, "torchrun.py"]),
        (["./run.sh", "train.py"], ["./run.sh", "train.py"]),
        (["python", "-m", "pack"], [f"{beside}/python", "-m", "pack"]),
        (["sh", "-c", "true"], ["/bin/sh", "-c", "true"]),
    ):  # fmt: skip
        if command is None:
            with pytest.raises(UsageError, match="no such script"):
                program_of(words[0], words[1:], module=False, text=False)
        else:
            program = program_of(words[0], words[1:], module=False, text=False)
            assert Program(name="it", **program).words == command
    assert program_of("sh", ["run.sh", "torchrun.py", "1"], module=False, text=False)["path"] == "torchrun.py"


def test_a_script_that_begins_with_a_dash_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python is given its path; a dash alone is the standard input."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-dash.py").touch()
    assert program_of("-dash.py", [], module=False, text=False)["path"] == "./-dash.py"
    assert program_of("-", [], module=False, text=False)["path"] == "-"
