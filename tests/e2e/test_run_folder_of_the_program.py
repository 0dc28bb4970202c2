"""`exec` and a program that reads, copies or archives its own folder, or makes, empties or deletes that of runs: neither notices the other."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from command import forked, python, report_of
from patience import PATIENCE, becomes

pytestmark = pytest.mark.slow

OVERFLOW = """
import os, shutil, torch
{begin}
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).half()
with torch.no_grad():
    net[0].weight.fill_(1.0)
    net[1].weight.fill_(6e4)
net(torch.ones(2, 4).half())
"""

FOLDERS = {
    "makes it": "os.mkdir('runs'); open('runs/log', 'w').close()",
    "deletes it and makes it": "shutil.rmtree('runs', ignore_errors=True); os.makedirs('runs/first'); open('runs/log', 'w').close()",
    "deletes it": "shutil.rmtree('runs', ignore_errors=True)",
    "lists it": "assert not os.path.exists('runs'); assert 'runs' not in os.listdir('.')",
}
"""What a program does about ``runs``, which is where a run lies that has no ``--out``."""


def written(folder: Path, begin: str) -> Path:
    """The overflowing program, which first does something else."""
    path = folder / "work.py"
    path.write_text(OVERFLOW.format(begin=begin))
    return path


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("begin", FOLDERS.values(), ids=FOLDERS)
def test_a_program_does_with_runs_what_it_would_alone(begin: str, tmp_path: Path) -> None:
    """It ends with status 0, its overflow is found and replayed, and the run lies beside what it left in ``runs``."""
    done = forked("exec", "--once", "--propagate-exit", written(tmp_path, begin), cwd=tmp_path)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "runs").glob("work-*")
    (finding,) = report_of(run)["findings"]
    assert (finding["id"], finding["op"], finding["confidence"]) == ("float16-overflow", "aten.addmm.default", "proven")
    assert f"runs/{run.name}" in done.err
    assert (tmp_path / "runs" / "log").exists() is ("log" in begin)


@pytest.mark.release
def test_another_run_of_a_program_that_makes_runs_finds_none_of_its_first(tmp_path: Path) -> None:
    """What the first run made in ``runs`` is not there in the second, and its own records are not lost."""
    begin = "os.makedirs('runs', exist_ok=True); assert not os.path.exists('runs/log'); open('runs/log', 'w').close()"
    forked("exec", "--verify-uninstrumented", written(tmp_path, begin), cwd=tmp_path)
    (run,) = (tmp_path / "runs").glob("work-*")
    assert [json.loads((run / label / "exit.json").read_text())["code"] for label in ("before", "unwatched")] == [0, 0]


def test_a_record_that_the_program_deletes_is_said_to_be_deleted(tmp_path: Path) -> None:
    """It empties the folder of temporary files: nothing is known of the run then, and nothing else is said of it: no finding, no health, no end."""
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    program = written(
        work, "for name in os.listdir(os.environ['TMPDIR']): shutil.rmtree(os.environ['TMPDIR'] + '/' + name)"
    )
    done = forked("exec", "--out", work / "runs" / "mine", program, cwd=work, TMPDIR=str(elsewhere))
    assert done.code == 3
    assert "NOTHING MEASURED: The program deleted the folder with the records of this run" in " ".join(done.err.split())
    assert not [word for word in ("Nothing found", "finite", "os._exit", "cannot write") if word in done.err]
    assert report_of(work / "runs" / "mine")["status"] == "unknown"


USES_OF_A_FOLDER = """
import glob, hashlib, os, shutil, subprocess, tarfile, tempfile, torch, zipfile

away = tempfile.mkdtemp(dir="..")

def steps():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

def contents():
    for root, folders, files in sorted(os.walk(".")):
        if not root.startswith("./.git"):
            yield root, sorted(folders), [(name, digest(os.path.join(root, name))) for name in sorted(files)]

def digest(path):
    with open(path, "rb") as file:
        return hashlib.md5(file.read()).hexdigest()

def printed(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    print(command, done.returncode, sorted(done.stdout.splitlines()), done.stderr)

for number in range(2):
    print(list(contents()), sorted(glob.glob("**", recursive=True, include_hidden=True)) if number == 0 else "")
    shutil.copytree(".", f"{away}/copy-{number}")
    with zipfile.ZipFile(f"{away}/{number}.zip", "w") as archive:
        for name in sorted(glob.glob("**", recursive=True)):
            archive.write(name)
        print(archive.namelist())
    with tarfile.open(f"{away}/{number}.tar", "w") as archive:
        archive.add(".")
        print([name for name in sorted(archive.getnames()) if not name.startswith("./.git")])
    printed("du", "-a", "--apparent-size", "--exclude=.git")
    printed("git", "status", "--porcelain", "--ignored", "--untracked-files=all")
    printed("git", "add", "-A")
    printed("git", "ls-files", "--stage")
    steps()
"""
"""What programs do with their own folder, before and after they have trained; all that comes of it is printed."""


def test_a_program_reads_copies_and_archives_its_folder_as_it_would_alone(tmp_path: Path) -> None:
    """It hashes, lists, copies, zips, tars, measures and commits all that lies below its working directory; what it prints is the same, in the first
    run and in another.
    """
    recorded = ("-m", "dtypedoctor", "exec", "--propagate-exit", "--out", "out", "--verify-uninstrumented", "work.py")
    printed = []
    for name, words in (("alone", ("work.py",)), ("recorded", recorded)):
        work = tmp_path / name / "work"
        work.mkdir(parents=True)
        (work / "work.py").write_text(USES_OF_A_FOLDER)
        subprocess.run(["git", "init", "--quiet"], cwd=work, check=True)
        done = python(*words, cwd=work)
        assert done.code == 0, done.err
        printed.append(done.out)
    printed.append((work / "out" / "unwatched" / "stdout.txt").read_text())
    assert printed == [printed[0]] * 3


KINDS = """
import os, stat, torch
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).half()
with torch.no_grad():
    net[1].weight.fill_(6e4)
    net[0].weight.fill_(1.0)
net(torch.ones(2, 4).half())
(record,) = [folder for folder, _, files in os.walk(os.environ["TMPDIR"]) if "events.jsonl" in files]
kinds = {name: stat.S_IFMT(os.lstat(os.path.join(record, name)).st_mode) for name in os.listdir(record)}
print({stat.S_IFREG, stat.S_IFDIR} >= set(kinds.values()))
"""

BEGINNINGS = {
    "exec": (["-m", "dtypedoctor", "exec", "--once", "work.py"], ""),
    "watch": (["work.py"], "import dtypedoctor\ndtypedoctor.watch().__enter__()\n"),
}


@pytest.mark.release
@pytest.mark.parametrize(("words", "begin"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_no_folder_of_ours_ever_holds_a_pipe(words: list[str], begin: str, tmp_path: Path) -> None:
    """There are plain files only: whoever reads a pipe waits for ever, and it cannot be copied."""
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    (work / "work.py").write_text(begin + KINDS)
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(elsewhere)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=work,
        capture_output=True,
        text=True,
        env=os.environ | paths,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr
    assert becomes(lambda: not list(elsewhere.iterdir()))
    assert len(list(work.glob("runs/work-*/before/events.jsonl"))) == 1


WAITING = """
    import time, torch
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    open("entered", "w").close()
    time.sleep(600)
"""


def test_what_was_recorded_until_dtypedoctor_was_killed_lies_where_it_would_have(tmp_path: Path) -> None:
    """SIGKILL leaves the run in ``runs``, and it can be read."""
    (tmp_path / "work.py").write_text(textwrap.dedent(WAITING))
    process = subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", "exec", "work.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
    )
    assert becomes(lambda: (tmp_path / "entered").exists())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert becomes(lambda: len(list(tmp_path.glob("runs/work-*/before/events.jsonl"))) == 1)
