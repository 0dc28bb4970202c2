"""Terminals and pipes of every kind: the exit code is the run's, no traceback is shown, and the report is there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import report_of
from patience import PATIENCE
from recorded import run_directory

from dtypedoctor.cli import main as command_line

ASCII = {"PYTHONIOENCODING": "ascii"}
POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

OVERFLOW = """
import torch
big = torch.nn.Linear(4, 4).half()
with torch.no_grad():
    big.weight.fill_(6e4)
big(torch.ones(2, 4).half())
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a report."""
    return run_directory("gemma4_grpo_fp16", tmp_path_factory.mktemp("streams") / "run-\u2192")


@contextmanager
def broken_pipe() -> Iterator[int]:
    """A pipe whose reader has gone."""
    source, end = os.pipe()
    os.close(source)
    yield end
    os.close(end)


def finished(
    *arguments: str | Path, shell: str = "", cwd: Path | None = None, **more: object
) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "dtypedoctor", *map(str, arguments)]
    if shell:
        command = ["/bin/sh", "-c", shell, "sh", *command]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {
        "env": os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        | more.pop("environment", {})
    }
    return subprocess.run(command, cwd=cwd, check=False, timeout=PATIENCE, **{**streams, **environment, **more})


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("columns", ["", "abc", "0", "999999999999"])
def test_any_number_of_columns_is_survived(columns: str, run: Path) -> None:
    """COLUMNS is what a shell, a container or a CI has made of it."""
    done = finished("report", run, environment={"COLUMNS": columns})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"float16" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 4000


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["report"], ASCII), (["report"], POSIX), (["report", "--format", "html"], POSIX), (["compare"], ASCII)],
    ids=lambda value: " ".join(value),
)
def test_a_terminal_without_unicode_gets_what_it_can_show(
    arguments: list[str], environment: dict[str, str], run: Path
) -> None:
    """A document is UTF-8 all the same, as it says itself."""
    verb, *options = arguments
    places = [run / "before", run / "remedy-bfloat16"] if verb == "compare" else [run]
    done = finished(verb, *places, *options, environment=environment)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (10 if verb == "compare" else 0), done.stderr
    if not options:
        assert done.stdout.isascii()
    done.stdout.decode("utf-8")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_survived(closed: str, run: Path) -> None:
    """As daemons have them; no file of ours takes the place of one."""
    done = finished("report", run, shell=f'"$@" {closed}')
    assert done.returncode == 0
    assert done.stderr == b""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("arguments", [["report"], ["report", "--format", "html"], ["--help"]], ids=" ".join)
def test_a_reader_that_has_gone_changes_nothing(arguments: list[str], run: Path) -> None:
    """``| head -1``: neither a traceback nor another exit code."""
    places = [run] if arguments[0] == "report" else []
    with broken_pipe() as end:
        done = finished(arguments[0], *places, *arguments[1:], stdout=end)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    "arguments", ["report RUN --format md", "report RUN", "--help", "compare RUN/before RUN/before"]
)
def test_a_full_device_is_said(arguments: str, run: Path) -> None:
    """What was asked for and could not be written is no success, whatever it is."""
    words = [word.replace("RUN", str(run)) for word in arguments.split()]
    with open("/dev/full", "wb") as full:
        done = finished(*words, stdout=full)
    assert done.returncode == 2
    assert b"error: standard output cannot be written: No space left on device\n" in done.stderr


HOSTILE = "x\x1b]0;PWN\x07\x9b2J\u202e"
"""A name that sets the title of a terminal, clears it (with a C1 control) and reorders what follows it."""


def test_every_verb_writes_to_standard_error_by_one_function() -> None:
    """``say`` writes what does not print as an escape; ``main`` does that for errors itself."""
    sources = [path for path in Path(command_line.__file__).parent.glob("*.py") if path.name != "main.py"]
    assert not [path.name for path in sources if "file=sys.stderr" in path.read_text()]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("verb", ["run", "replay", "compare"])
def test_a_name_sends_no_control_characters_to_the_terminal(verb: str, run: Path, tmp_path: Path) -> None:
    """Neither in the line that says what begins nor in the one that says what to type next."""
    if verb == "compare":
        (tmp_path / HOSTILE).symlink_to(run / "before")
    done = finished(verb, HOSTILE, *([run / "before"] if verb == "compare" else []), cwd=tmp_path)
    shown = done.stderr.decode()
    assert r"x\x1b]0;PWN\x07\x9b2J\u202e" in shown
    assert shown.replace("\n", "").isprintable()


@pytest.mark.release
@pytest.mark.parametrize("how", ["closed", "no reader", "ascii"])
def test_a_run_that_has_cost_its_time_is_never_lost_to_its_streams(how: str, tmp_path: Path) -> None:
    """The script overflows; exit code and report are those of any other terminal, whoever reads what is printed."""
    (tmp_path / "work.py").write_text(OVERFLOW)
    words = {"shell": '"$@" <&- >&- 2>&-' if how == "closed" else "", "cwd": tmp_path}
    with broken_pipe() as end:
        gone = {"stdout": end, "stderr": end} if how == "no reader" else {}
        settings = {"environment": {**ASCII, "COLUMNS": "0"}} if how == "ascii" else {}
        done = finished("exec", "--out", "run", "work.py", **words, **gone, **settings)
    assert done.returncode == 10
    report = report_of(tmp_path / "run")
    assert report["findings"][0]["id"] == "float16-overflow"
    assert (tmp_path / "run" / "before" / "events.jsonl").read_bytes().startswith(b"{")
