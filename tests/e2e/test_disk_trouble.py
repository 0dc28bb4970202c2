"""A disk that fills up, a directory that goes away, two runs at once: the training goes on, and the report says what is missing."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Finished, forked, in_this_process, report_of
from patience import PATIENCE

from dtypedoctor.runner.run import NO_END
from dtypedoctor.trace.events import Header, Site
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.writer import TraceWriter

TRAINING = """
import torch
{before}
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range({steps}):
    if step == 20:
        {middle}
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", step + 1)
"""


def training(folder: Path, *, steps: int = 40, before: str = "", middle: str = "pass") -> Path:
    """A script that trains a tiny network, and does something before or in the middle."""
    script = folder / "train.py"
    script.write_text(TRAINING.format(steps=steps, before=before, middle=middle))
    return script


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The folder of a program, in which it is not recorded."""
    folder = tmp_path / "code"
    folder.mkdir()
    return folder


def shrinking(disk: Path) -> str:
    """What a program does so that a disk that had room has hardly any left."""
    return f"import os; os.system('mount -o remount,size=256k {disk}')"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, large enough to be recorded on at first."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def goes_on(finished: Finished, steps: int, code: int = 10) -> None:
    """The training came to its end, the watch did not, and no traceback is shown."""
    assert f"trained {steps}" in finished.out, finished.err
    assert "Traceback" not in finished.err
    assert finished.code == code
    said = " ".join(finished.err.split())
    assert "recording stopped" in said or "only part of the trace is readable" in said


def test_a_training_goes_on_when_the_disk_is_full(small_disk: Path, code: Path) -> None:
    """A real file system that fills up in the middle; there is no room for a report either, so it is only shown."""
    script = training(code, steps=1500, before=shrinking(small_disk))
    finished = forked("exec", "--out", small_disk / "run", script, cwd=code, TMPDIR=str(small_disk))
    goes_on(finished, 1500)
    assert "recording stopped (No space left on device" in finished.err
    assert "cannot write the report to" in finished.err


def test_a_record_for_which_there_is_no_room_stays_where_it_is(small_disk: Path, code: Path) -> None:
    """The disk that was asked for is full, and was so before: the run is recorded on another, and the first screen says where."""
    subprocess.run(["mount", "-o", "remount,size=8k", str(small_disk)], check=True)
    fill(small_disk)
    finished = forked("exec", "--out", small_disk / "run", training(code), cwd=code, TMPDIR=str(small_disk))
    goes_on_elsewhere = re.search(r"the run stays in (\S+)", finished.err)
    assert finished.code == 0, finished.err
    assert goes_on_elsewhere is not None, finished.err
    assert report_of(Path(goes_on_elsewhere[1]))["status"] == "healthy"
    shutil.rmtree(goes_on_elsewhere[1])


OVERFLOWING = """
import os, pathlib, sys, torch
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).half()
with torch.no_grad():
    net[1].weight.fill_(6e4)
    net[0].weight.fill_(1.0)
net(torch.ones(2, 4).half())
checkpoints = pathlib.Path(sys.argv[1], "exp", "stdout.txt")
checkpoints.mkdir(parents=True)
torch.save(net.state_dict(), checkpoints / "checkpoint.pt")
"""
"""Overflows in its second layer, and saves a checkpoint in a folder of its own below the one that it is given."""


def test_a_run_whose_script_is_gone_is_diagnosed_with_its_replay(small_disk: Path, code: Path) -> None:
    """The failing call was made again while the program ran, so nothing needs the script any more."""
    script, out = code / "train.py", small_disk / "run"
    script.write_text(OVERFLOWING + "os.remove(__file__)")
    finished = forked("exec", "--once", "--out", out, script, out, cwd=code, TMPDIR=str(small_disk))
    assert finished.code == 10, finished.err
    assert "Traceback" not in finished.err
    assert "overflow" in finished.err
    assert "replayed in the process itself" in " ".join((out / "report.md").read_text(encoding="utf-8").split())
    assert (out / "before" / EVENTS).stat().st_size > 0
    assert (out / "exp" / "stdout.txt" / "checkpoint.pt").is_file()


def fill(disk: Path) -> None:
    """Leaves not a byte free."""
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def test_a_training_goes_on_when_its_files_may_not_grow(tmp_path: Path) -> None:
    """A limit on the size of files, as batch systems set; the report is written and says what is missing."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))"
    finished = forked("exec", "--out", tmp_path / "run", training(tmp_path, steps=400, before=limit))
    goes_on(finished, 400)
    report = report_of(tmp_path / "run")
    assert report["status"] == "unknown"
    assert report["headline"].startswith("Nothing found until recording stopped (File too large), ")
    assert "raise the process's file size limit" in report["headline"]
    assert "everything measured is finite" in report["headline"]
    assert any("File too large" in line and "were not written" in line for line in report["coverage"])


REMOVE = "import glob, os, shutil; shutil.rmtree(*glob.glob(os.environ['TMPDIR'] + '/dtypedoctor-*'))"


OVERFLOW = """
import torch
big = torch.nn.Linear(4, 4).half()
with torch.no_grad():
    big.weight.fill_(6e4)
big(torch.ones(2, 4).half())
"""


def in_shell(before: str, *arguments: str | Path, cwd: Path, **environment: str) -> Finished:
    """Runs ``dtypedoctor ARGUMENTS`` after a command of the shell."""
    done = subprocess.run(
        [
            "/bin/bash",
            "-c",
            f'{before} && exec "$@"',
            "bash",
            sys.executable,
            "-m",
            "dtypedoctor",
            *map(str, arguments),
        ],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return Finished(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("kib", [16, None])
def test_only_reports_that_could_be_written_are_named(kib: int | None, tmp_path: Path) -> None:
    """A page for which there is no room is not called the full report."""
    (tmp_path / "work.py").write_text(OVERFLOW)
    done = in_shell(f"ulimit -f {kib}" if kib else "true", "exec", "--once", "--out", "run", "work.py", cwd=tmp_path)
    assert done.code == 10
    named = re.search(r"Full report: run/(.+) \((.+)\)", done.err)
    assert named is not None
    assert {named[1], *named[2].split(", ")} == {path.name for path in (tmp_path / "run").glob("report.*")}
    assert named[1] == ("report.md" if kib else "report.html")


def test_a_limit_of_open_files_is_no_lack_of_space(tmp_path: Path) -> None:
    """The hint names the limit that was met."""
    (tmp_path / "work.py").write_text("import torch")
    done = in_shell("ulimit -n 5", "exec", "--out", "run", "work.py", cwd=tmp_path)
    assert done.code == 2
    assert "Too many open files" in done.err
    assert "ulimit -n" in done.err
    assert "space" not in done.err


def test_a_deleted_working_directory_is_named_or_does_not_matter(code: Path, tmp_path: Path) -> None:
    """A program that Python runs there is run and reported on; what cannot be done there says why, with no traceback."""
    (script := code / "work.py").write_text(OVERFLOW)
    (bare := code / "bare.py").write_text("print('it runs')")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    job = tmp_path / "run"
    forked("exec", "--once", "--out", job, script, cwd=tmp_path)
    (job / "job.json").write_text('{"argv": ["python", "work.py"], "failed": false}')
    for words, ends_with in (
        (["exec", "--out", tmp_path / "bare", bare], 10),
        (["exec", bare], 10),
        (["job-report", job], 10),
        (["inspect", "builtin:gemma4-tiny"], 2),
        (["exec", "--rerun", bare], 2),
        (["run", "gemma4_grpo_fp16"], 2),
    ):
        (tmp_path / "gone").mkdir()
        done = in_shell("cd gone && rmdir ../gone", *words, cwd=tmp_path, TMPDIR=str(elsewhere))
        assert done.code == ends_with, (words, done.err)
        assert "Traceback" not in done.err
        assert ("The working directory no longer exists" in done.err) == (ends_with == 2)
        assert "server.log" not in done.err
        assert done.out == ("it runs\n" if words[-1] == bare and ends_with == 10 else "")


def test_a_training_goes_on_when_its_record_is_removed(code: Path, tmp_path: Path) -> None:
    """Somebody cleans up in the middle of a run; there is no trace that could be used then, and the report, which is in its place, says why."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    script = training(code, middle=REMOVE)
    finished = forked("exec", "--out", tmp_path / "run", script, cwd=code, TMPDIR=str(elsewhere))
    assert "trained 40" in finished.out
    assert "Traceback" not in finished.err
    assert finished.code == 3
    assert "The program deleted the folder with the records of this run" in " ".join(finished.err.split())
    assert report_of(tmp_path / "run")["status"] == "unknown"


@pytest.mark.release
def test_a_watch_from_inside_goes_on_without_its_record(code: Path, tmp_path: Path) -> None:
    """``dtypedoctor.watch()`` says on stderr that there is no report, and the program comes to its own end."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    script = code / "inside.py"
    body = training(code, middle=REMOVE).read_text()
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    script.write_text(f"import dtypedoctor\nwith dtypedoctor.watch(out={str(tmp_path / 'run')!r}):\n{indented}")
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(elsewhere)}
    done = subprocess.run([sys.executable, script], cwd=code, capture_output=True, text=True, env=os.environ | paths,
                          check=False, timeout=PATIENCE)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "trained 40\n")
    assert "no report" in done.stderr
    assert "Traceback" not in done.stderr


def left_alone(directory: Path) -> TraceWriter:
    """A trace whose doctor was ended together with the program."""
    directory.mkdir(parents=True)
    writer = TraceWriter(directory)
    writer.write(Header(created=1.0, pid=1))
    writer.write(Site(id=1, root=0, fqn="model.head", cls="Linear", phase="forward", kind="output", index="", dtype="float16",
                      shape=[1]))  # fmt: skip
    writer.write_samples(writer.next_n(), 1, 1, [(1, 2.0, 0, 0)])
    writer.mark(1, 1, 1)
    return writer


def test_a_trace_without_a_report_is_reported(tmp_path: Path) -> None:
    """Where nobody lived to write a report, ``dtypedoctor report`` makes it of the trace."""
    left_alone(tmp_path / "run" / "before").close()
    finished = in_this_process("report", tmp_path / "run", "--format", "md")
    assert finished.code == 0, finished.err
    assert f"The worker {NO_END}; the last module entered was model.head" in finished.said


def test_a_damaged_trace_without_a_report_says_what_is_lost(tmp_path: Path) -> None:
    """One flipped bit: its line is counted, all others are read."""
    left_alone(tmp_path / "before").close()
    path = tmp_path / "before" / EVENTS
    data = path.read_bytes().replace(b'["s",', b'["s";', 1)
    path.write_bytes(data)
    finished = in_this_process("report", tmp_path, "--format", "md")
    assert finished.code == 0
    assert "1 unreadable line(s): 3" in finished.out
