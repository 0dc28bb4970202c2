"""`exec --rerun` leaves the working directory as one run leaves it, and repeats scripts that a second run in it would change."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import forked, python, report_of

from dtypedoctor.runner.view import NoViewError, View

OVERFLOW = """
    import os, torch
    from pathlib import Path

    class Square(torch.nn.Module):
        def forward(self, x):
            return x * x

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), Square()).half()
    {begin}
    for step in range(start, start + 3):
        loss = net(torch.full((2, 4), 10.0 ** step, dtype=torch.float16)).mean()
        {end}
"""
"""Inf in its third step, where 1,000 times a weight is squared."""

SCRIPTS = {
    "creates its output folder": ("os.mkdir('out'); start = 1", "Path('out', f'{step}.txt').write_text(str(step))"),
    "resumes from its checkpoint": (
        "start = torch.load('state.pt') if os.path.exists('state.pt') else 1",
        "torch.save(step + 1, 'state.pt')",
    ),
}
"""How a script begins, and what it does in each step. Without a fresh folder the first fails, and the second begins elsewhere."""


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
ENVIRONMENT.pop("DTYPEDOCTOR_RERUN_IN_PLACE", None)


def written(folder: Path, begin: str, end: str) -> Path:
    folder.mkdir()
    (folder / "log.txt").write_text("begun\n")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(OVERFLOW.format(begin=begin, end=end)))
    return script


def files(folder: Path) -> dict[str, bytes | None]:
    """What lies below a folder, but for what this package leaves there: None for a directory."""
    paths = [path for path in folder.rglob("*") if "runs" not in path.relative_to(folder).parts]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in sorted(paths)}


def view_or_skip(folder: Path) -> None:
    try:
        View(folder)
    except NoViewError as error:
        pytest.skip(str(error))


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("begin", "end"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_rerun_repeats_the_first_run_and_leaves_its_files(begin: str, end: str, tmp_path: Path) -> None:
    """The folder is bitwise what one run leaves, and the rerun confirms the finding; the run directory lies in the folder."""
    view_or_skip(tmp_path)
    script, alone = written(tmp_path / "program", begin, end), written(tmp_path / "alone", begin, end)
    assert python(alone, cwd=alone.parent).code == 0
    finished = forked("exec", "--rerun", "--out", "runs/report", script, cwd=script.parent)
    report = report_of(script.parent / "runs" / "report")
    assert files(script.parent) == files(alone.parent)
    assert "in a copy-on-write view of the working directory" in finished.err
    assert [(one["id"], one["step"], one["confidence"]) for one in report["findings"]] == [
        ("float16-overflow", 3, "proven")
    ]
    assert "in the same way" in report["observer"]["reason"]
    assert "another way" not in report["headline"]
    assert "could not be made" not in str(report["coverage"])


@pytest.mark.release
def test_a_rerun_that_goes_another_way_is_in_the_headline(tmp_path: Path) -> None:
    """What lies outside of the working directory is not put back, so the script ends otherwise."""
    (tmp_path / "start.txt").write_text("1")
    begin = "start = int(Path('../start.txt').read_text()); os.unlink('../start.txt')"
    script = written(tmp_path / "program", begin, "pass")
    forked("exec", "--rerun", "--out", tmp_path / "report", script, cwd=script.parent)
    headline = report_of(tmp_path / "report")["headline"]
    assert headline.startswith("float16 overflow in model[1]")
    assert "The rerun went another way: " in headline
    assert "FileNotFoundError" in headline


RESUMES = {
    "a checkpoint": (
        "start = torch.load('state.pt')['step'] if os.path.exists('state.pt') else 1",
        "torch.save({'step': step + 1}, 'state.pt')",
    ),
    "a log through os.open": (
        "start = 1",
        "os.write(os.open('log.txt', os.O_WRONLY | os.O_CREAT | os.O_APPEND), b'step')",
    ),
}
"""What a script continues of an earlier run in its folder: how it begins, and what it does in each step."""
REPLACES = {
    "reads what it has written itself": (
        "start = 1",
        "torch.save(step, 'state.pt'); assert torch.load('state.pt') == step",
    ),
    "has a cache of its own, marked as such": (
        "import pathlib; start = 1; seen = pathlib.Path('tool/v/seen.txt'); seen.exists() and seen.read_text()",
        "seen.parent.mkdir(parents=True, exist_ok=True); pathlib.Path('tool/CACHEDIR.TAG').touch(); seen.write_text('step')",
    ),
    "opens what is no file": (
        "import sys; start = 1; os.mkdir(f'gone{os.getpid()}'); os.chdir(f'gone{os.getpid()}'); os.rmdir(os.getcwd()); sys.audit('open', 'x')",
        """os.close(os.dup(1))
        try:
            open('a\\0b')
        except ValueError:
            pass""",
    ),
}


@pytest.mark.release
@pytest.mark.parametrize(("begin", "end"), RESUMES.values(), ids=RESUMES)
def test_a_rerun_in_place_does_not_continue_what_the_first_run_wrote(begin: str, end: str, tmp_path: Path) -> None:
    """Its files are those of one run; the finding is the first run's, and the report says why there is no second."""
    script, alone = written(tmp_path / "program", begin, end), written(tmp_path / "alone", begin, end)
    assert python(alone, cwd=alone.parent).code == 0
    finished = forked("exec", "--rerun", "--rerun-in-place", "--out", tmp_path / "report", script, cwd=script.parent)
    report = report_of(tmp_path / "report")
    assert finished.code == 10
    assert files(script.parent) == files(alone.parent)
    assert [(one["id"], one["fqn"], one["step"]) for one in report["findings"]] == [("float16-overflow", "1", 3)]
    assert "written during its first run" in str(report["coverage"])
    assert "written during its first run" in " ".join(finished.err.split()), "that is why no ablation tells anything"


@pytest.mark.release
@pytest.mark.parametrize(("begin", "end"), REPLACES.values(), ids=REPLACES)
def test_a_script_that_begins_anew_is_run_again_in_place(begin: str, end: str, tmp_path: Path) -> None:
    """The run without instrumentation is not kept from the files that it begins anew."""
    script = written(tmp_path / "program", begin, end)
    forked("exec", "--rerun", "--rerun-in-place", "--out", tmp_path / "report", script, cwd=script.parent)
    report = report_of(tmp_path / "report")
    assert [(one["id"], one["op"], one["confidence"]) for one in report["findings"]] == [
        ("float16-overflow", "aten.mul.Tensor", "proven")
    ]
    assert "written during its first run" not in str(report["coverage"])


def without_view(folder: Path, *arguments: str | Path) -> list[str]:
    """The command in a mount namespace where a file system is mounted below ``folder``, over which no overlay is laid."""
    (folder / "mounted").mkdir()
    command = [sys.executable, "-m", "dtypedoctor", "exec", *map(str, arguments)]
    return ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs none mounted && exec "$@"', "sh", *command]


def ended(command: list[str], folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command in a folder, without a terminal, when it is over."""
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env=ENVIRONMENT | environment,
    )  # fmt: skip


@pytest.mark.release
def test_without_a_view_no_other_run_is_made(tmp_path: Path) -> None:
    """The command is refused before the script runs; with the option the script runs again in its directory."""
    view_or_skip(tmp_path)
    script = written(tmp_path / "program", "start = 1", "print(step, file=open('steps.txt', 'a'))")
    command = without_view(script.parent, "--verify-uninstrumented", "--out", tmp_path / "report", script)
    refused = ended(command, script.parent)
    assert refused.returncode == 2
    assert "another file system is mounted at" in refused.stderr
    assert "--rerun-in-place" in refused.stderr
    assert not (script.parent / "steps.txt").exists()
    assert not (tmp_path / "report").exists()
    done = ended(command, script.parent, DTYPEDOCTOR_RERUN_IN_PLACE="1")
    assert done.returncode == 10
    assert "it may change files" in done.stderr


REACHES_OUT = """
import os, signal, socket, subprocess, sys
for path in sys.argv[2:]:
    for reach in (
        lambda: os.write(os.open(path + "/pipe", os.O_WRONLY | os.O_NONBLOCK), b"x"),
        lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", path + "/socket"),
    ):
        try:
            reach()
        except OSError:
            pass
try:
    os.kill(int(sys.argv[1]), signal.SIGUSR1)
except OSError:
    pass
child = subprocess.Popen(["sleep", "60"])
child.terminate()
assert child.wait() == -signal.SIGTERM
open("/dev/null", "w").write("x")
"""
"""A program that writes into named pipes, sends to sockets that are files, and signals a process that it has not started; of its own it can do what it likes."""


def test_an_edit_on_trial_reaches_nobody_outside(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither by pipes and sockets in the working directory, nor by such elsewhere, nor by signals."""
    view_or_skip(tmp_path)
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 6:
        pytest.skip("this kernel keeps no signals from other processes")
    script, elsewhere = tmp_path / "program.py", tmp_path_factory.mktemp("elsewhere")
    script.write_text(REACHES_OUT)
    run = tmp_path_factory.mktemp("run")
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGUSR1, before)
        ends = [stack.enter_context(listening(folder)) for folder in (tmp_path, elsewhere)]
        words = stack.enter_context(View(tmp_path).before(run, {str(script): REACHES_OUT}))
        command = [*words, sys.executable, str(script), str(os.getpid()), str(tmp_path), str(elsewhere)]
        # so that the other folder is none of temporary files, of which there is a copy
        subprocess.run(command, check=True, cwd=tmp_path, env=ENVIRONMENT | {"TMPDIR": str(run)})
        for pipe, inbox in ends:
            assert os.read(pipe, 1) == b""
            with pytest.raises(BlockingIOError):
                inbox.recv(1)
    assert not heard


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[tuple[int, socket.socket]]:
    """Somebody reads a pipe and a socket in a folder."""
    os.mkfifo(folder / "pipe")
    pipe = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(folder / "socket"))
        inbox.setblocking(False)
        yield pipe, inbox
    os.close(pipe)
