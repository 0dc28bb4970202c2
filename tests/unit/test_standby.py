"""Forks of a program that stand by: the program cannot tell, and what goes on goes on from that moment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtypedoctor.replay.cage import is_supported
from dtypedoctor.replay.wake import dismiss, go_on, waiting_in

pytestmark = pytest.mark.skipif(not is_supported(), reason="Linux on x86-64 only")

PROGRAM = """
import os, random, signal, sys, threading, time
from pathlib import Path
from dtypedoctor.replay import standby
from dtypedoctor.replay.standby import Standby, stand_by

folder = Path(sys.argv[1])
told, forks = [], []
signal.signal(signal.SIGCHLD, lambda *_: told.append(1))
os.register_at_fork(after_in_parent=lambda: forks.append(1))
threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
random.seed(1)
number = 7
lines = (folder / "lines").open(buffering=1)
next(lines)
before = sorted(os.listdir("/proc/self/fd"))
standby._be_killed_first = lambda: time.sleep(float(sys.argv[2]))
made = stand_by(folder / "standby-1-3")
if not isinstance(made, Standby):
    done = os.open(made["done"], os.O_WRONLY)
    os.write(done, str(os.getpid()).encode())
    if made["hang"]:
        time.sleep(600)
    Path(made["directory"], "said").write_text(f"{number} {random.random()} {next(lines).strip()}")
    os._exit(0)
assert sorted(os.listdir("/proc/self/fd")) == before
number = 8
random.random()
rest = lines.read().split()
try:
    os.wait()
    sys.exit("there was a child")
except ChildProcessError:
    pass
assert not told, told
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
print(number, rest, len(told), made.seconds, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A program with a standby, which sleeps for so many seconds before it is ready; it waits for the end of its input."""
    (tmp_path / "lines").write_text("one\ntwo\nthree\n")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), getattr(request, "param", "0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def test_a_program_cannot_tell_and_what_goes_on_has_its_state(program: subprocess.Popen[str], tmp_path: Path) -> None:
    """Children, signals, descriptors and file positions of the program are its own; a standby can go on several times."""
    assert program.stdout is not None
    assert program.stdout.readline().split("]")[0] == "8 ['two', 'three'"
    (waiting,) = waiting_in(tmp_path)
    assert (waiting.step, waiting.call) == (1, 3)
    for label in ("once", "again"):
        place = tmp_path / label
        place.mkdir()
        assert go_on(waiting, place, {"hang": False}, 30)
        assert (place / "said").read_text() == "7 0.13436424411240122 two"
    dismiss(tmp_path)
    assert not waiting_in(tmp_path)
    program.communicate("")
    assert program.returncode == 0


def test_what_hangs_is_killed(program: subprocess.Popen[str], tmp_path: Path) -> None:
    """The standby outlives it, and the program."""
    assert program.stdout is not None
    program.stdout.readline()
    program.communicate("")
    (waiting,) = waiting_in(tmp_path)
    for label, hang in (("hangs", True), ("ends", False)):
        place = tmp_path / label
        place.mkdir()
        assert go_on(waiting, place, {"hang": hang}, 0.5 if hang else 30) is not hang
    dismiss(tmp_path)


def test_a_standby_that_is_gone_is_an_error(program: subprocess.Popen[str], tmp_path: Path) -> None:
    """Nobody waits for ever at its pipe, also where another process has its number by now: this one has such a descriptor."""
    assert program.stdout is not None
    program.stdout.readline()
    (waiting,) = waiting_in(tmp_path)
    *_, inode = waiting.address.read_text().split()
    dismiss(tmp_path)
    program.communicate("")
    (tmp_path / "place").mkdir()
    _, write_end = os.pipe()
    waiting.address.write_text(f"{os.getpid()} {write_end} {inode}")
    with pytest.raises(OSError, match="no such standby"):
        go_on(waiting, tmp_path / "place", {"hang": False}, 30)


@pytest.mark.parametrize("program", ["3"], indirect=True)
def test_a_busy_machine_makes_no_standby_dear(program: subprocess.Popen[str], tmp_path: Path) -> None:
    """What it costs is processor time, so as many are made as on an idle machine: time in which nothing was computed does not count."""
    assert program.stdout is not None
    assert 0 < float(program.stdout.readline().split()[-1]) < 3
    program.communicate("")
    dismiss(tmp_path)
