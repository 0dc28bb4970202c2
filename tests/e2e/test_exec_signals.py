"""Signals and orphans: what is sent to the doctor reaches the script, and nothing that it has started outlives it."""

import contextlib
import operator
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import report_of
from patience import PATIENCE, becomes

from dtypedoctor.runner.process import outliving

CAUGHT = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGALRM,
    signal.SIGCONT,
    signal.SIGRTMIN,
    signal.SIGRTMAX,
)

COUNTS = f"""
    import os, signal, sys, time
    seen = []
    for number in {[int(number) for number in CAUGHT]}:
        signal.signal(number, lambda number, _: seen.append(number))
    def wait(for_many):
        end = time.monotonic() + {PATIENCE}
        while len(seen) < for_many and time.monotonic() < end:
            time.sleep(0.02)
        return sorted(set(map(int, seen)))
"""


def started(folder: Path, source: str, *options: str, **more: object) -> "subprocess.Popen[str]":
    """``dtypedoctor exec`` of a script, in a session of its own, with pipes for its streams."""
    (folder / "work.py").write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "dtypedoctor", "exec", "--once", "--out", "run", *options, "work.py"]
    return subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def line_of(process: "subprocess.Popen[str]") -> list[str]:
    """The next line that the script prints, in words."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    return line.split()


def state(pid: int) -> str:
    """The letter by which the kernel names what a process does; empty where there is none any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_every_signal_that_a_script_can_catch_reaches_it(tmp_path: Path) -> None:
    """Of SLURM, of launchers, of the terminal, real-time ones."""
    source = COUNTS + f"    print('ready', flush=True)\n    print('got', *wait({len(CAUGHT)}), flush=True)\n"
    process = started(tmp_path, source)
    assert line_of(process) == ["ready"]
    for number in CAUGHT:
        process.send_signal(number)
        time.sleep(0.05)  # those of one number that come at once are one
    assert line_of(process) == ["got", *map(str, sorted(map(int, CAUGHT)))]
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 10, errors  # nothing was measured
    assert report_of(tmp_path / "run")["status"] == "unknown"


def test_a_signal_to_the_process_group_reaches_the_script_once(tmp_path: Path) -> None:
    """Who sends it to the doctor alone before and after, reaches the script as often as he sends it."""
    source = """
        import signal, sys, time
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append("group"))
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("alone"))
        signal.signal(signal.SIGTERM, lambda *_: (print(*seen, flush=True), sys.exit()))
        print("ready", flush=True)
        while True: time.sleep(0.02)
    """
    process = started(tmp_path, source)
    assert line_of(process) == ["ready"]
    for send, number in [
        (process.send_signal, signal.SIGUSR1),
        (lambda number: os.killpg(process.pid, number), signal.SIGINT),
        (lambda number: os.killpg(process.pid, number), signal.SIGINT),
        (process.send_signal, signal.SIGUSR1),
        (process.send_signal, signal.SIGTERM),
    ]:
        send(number)
        time.sleep(0.5)
    assert line_of(process) == ["alone", "group", "group", "alone"]
    process.communicate(timeout=PATIENCE)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("options", [[], ["--nproc-per-node", "2"]], ids=["alone", "ranks"])
def test_a_killed_doctor_leaves_nothing_running(options: list[str], tmp_path: Path) -> None:
    """SIGKILL, which it can tell nobody of: the script ends, every rank, and what these have started, sessions of its own included."""
    source = """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(os.getpid(), child.pid, flush=True)
        time.sleep(600)
    """
    process = started(tmp_path, source, *options)
    running = {int(word) for _ in range(2 if options else 1) for word in line_of(process)}
    assert len(running) == (4 if options else 2)
    assert all(state(pid) for pid in running)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert becomes(lambda: not any(state(pid) not in ("", "Z") for pid in running))


def processes_of(mark: str) -> dict[int, bytes]:
    """The command lines of all processes that have inherited ``MARK=mark``."""
    marked = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is somebody else's, or has ended
            if f"\0MARK={mark}\0".encode() in b"\0" + (process / "environ").read_bytes():
                marked[int(process.name)] = (process / "cmdline").read_bytes()
    return marked


def processor_time(pid: int) -> float:
    """Seconds that a process has computed for; 0 where there is none any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty folder whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="d", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("at_work", [False, True], ids=["starting", "at work"])
@pytest.mark.parametrize(
    "verb",
    [
        ["run", "--out", "run", "gemma4_grpo_fp16"],
        ["bisect", "--out", "run", "gemma4_four_patches"],
        ["exec", "--out", "run", "work.py"],
    ],
    ids=operator.itemgetter(0),
)
def test_no_process_and_no_socket_is_left_of_a_killed_command(
    verb: list[str], tmp_path: Path, short_folder: Path, *, at_work: bool
) -> None:
    """SIGKILL while its processes import torch, and while they work: all end at once, and TMPDIR has nothing of multiprocessing's."""
    (tmp_path / "work.py").write_text("import time, torch\nopen('begun', 'w').close()\ntime.sleep(10_000)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", *verb], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "MARK": str(tmp_path), "TMPDIR": str(short_folder)},
    )  # fmt: skip
    started_one = lambda: re.search(
        rb"forkserver|python[0-9.]*\0work\.py", b"".join(processes_of(str(tmp_path)).values())
    )
    works = lambda: (tmp_path / "begun").exists() or any((tmp_path / "run").glob("**/events.jsonl"))
    assert becomes(lambda: process.poll() is not None or (works() if at_work else started_one()))
    time.sleep(0.2)  # imports of torch take longer
    assert process.poll() is None, process.communicate()
    used = {pid: processor_time(pid) for pid in processes_of(str(tmp_path))}
    process.kill()
    process.communicate(timeout=PATIENCE)

    def all_have_ended() -> bool:
        left = processes_of(str(tmp_path))
        # a busy machine lets them wait for their end, but none may go on with its work
        assert all(processor_time(pid) < used.get(pid, 0.0) + 1 for pid in left), left
        return not left

    assert becomes(all_have_ended)
    assert not [*short_folder.glob("pymp-*"), *short_folder.glob("**/listener-*")]


@pytest.mark.release
def test_nothing_is_run_again_once_somebody_asked_for_the_end(tmp_path: Path) -> None:
    """The script heeds SIGTERM in its own time and ends with status 0; its overflow is replayed, and the script not started again."""
    source = """
        import signal, time, torch
        ended = []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
        big = torch.nn.Linear(4, 4).half()
        with torch.no_grad():
            big.weight.fill_(6e4)
        big(torch.ones(2, 4).half())
        print("ready", flush=True)
        while not ended:
            time.sleep(0.02)
        print("saved", flush=True)
    """
    process = started(tmp_path, source, "--verify-uninstrumented")
    assert line_of(process) == ["ready"]
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (10, "saved\n"), errors
    assert report_of(tmp_path / "run")["findings"]
    assert [
        path.name for path in (tmp_path / "run").iterdir() if path.is_dir() and (path / "request.json").exists()
    ] == ["before"]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("measured", [False, True])
def test_an_interrupt_before_anything_was_measured_leaves_no_directory(tmp_path: Path, *, measured: bool) -> None:
    """The next command may use the same --out; what was measured before Ctrl-C is kept and reported. A file of the user's stays."""
    call = (
        "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))"
        if measured
        else "import os; os.mkdir('run'); open('run/own.txt', 'w').close()"
    )
    process = started(tmp_path, f"{call}\nimport time\nprint('ready', flush=True)\ntime.sleep(60)")
    assert line_of(process) == ["ready"]
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    if measured:
        assert report_of(tmp_path / "run")["status"] != "healthy"
    else:
        assert (process.returncode, left) == (130, ["own.txt"]), errors
        (tmp_path / "run" / "own.txt").unlink()
        (tmp_path / "run").rmdir()
        process = started(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(60)")
        assert line_of(process) == ["ready"]
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert "interrupted before anything was measured; run was removed" in errors
        assert not (tmp_path / "run").exists()


def interrupted(command: list[str], folder: Path, imported: str, pause: float | None) -> tuple[int, list[str]]:
    """Status of a command, and the lines on standard error, that Ctrl-C ends when it has imported a module; pressed again after a pause."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONPROFILEIMPORTTIME": "1"}, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    while (line := process.stderr.readline()) and line.split("|")[-1].strip() != imported:
        pass  # each import is a line
    process.send_signal(signal.SIGINT)
    if pause is not None:
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, [line for line in errors.splitlines() if not line.startswith("import time:")]


PAUSES = pytest.mark.parametrize("pause", [None, 0.0, 0.03], ids=["once", "twice at once", "twice"])
IMPORTED = ("cli", "cli.exec", "cli.main", "redaction.redact", "scenario.model", "trace.model", "cli.scripts")


PRESSED_TWICE = """
import os
import dtypedoctor.__main__ as command

def write(descriptor, text, really=os.write):
    command._end()  # a signal that is handled before the words are out, and one after them
    really(descriptor, text)
    command._end()

os.write = write
command._end()
"""


def test_a_second_ctrl_c_in_the_middle_of_the_first_says_nothing_more() -> None:
    """Python handles it wherever the first one's handler is."""
    done = subprocess.run([sys.executable, "-c", PRESSED_TWICE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


@pytest.mark.release(all_but=3)
@PAUSES
@pytest.mark.parametrize("imported", IMPORTED)
def test_ctrl_c_ends_a_command_that_has_hardly_begun_with_one_line(
    imported: str, pause: float | None, tmp_path: Path
) -> None:
    """No traceback of Python's, and status 130, however often it is pressed."""
    (tmp_path / "work.py").write_text("import time; time.sleep(60)")
    command = ["-m", "dtypedoctor", "exec", "--once", "--out", "run", "work.py"]
    status, said = interrupted(command, tmp_path, f"dtypedoctor.{imported}", pause)
    assert (status, len(said)) == (130, 1), said
    assert said[0].startswith("error: interrupted")


def test_a_signal_that_comes_between_two_runs_does_not_end_the_doctor() -> None:
    """A batch system warns all processes of a job; there is no script then that it could go to."""
    with outliving():
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGRTMIN):
            os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_server_that_the_script_leaves_behind_keeps_its_output(tmp_path: Path) -> None:
    """It writes after the script and the doctor have ended, and is read as it would be without the doctor."""
    server = """if True:
        import os, time
        while not os.path.exists("doctor-has-ended"):
            time.sleep(0.02)
        print("served", flush=True)
        print("well", flush=True)
    """
    source = f"""
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", {server!r}], start_new_session=True)
        print("started", flush=True)
    """
    process = started(tmp_path, source)
    assert line_of(process) == ["started"]
    assert process.wait(timeout=PATIENCE) == 10
    (tmp_path / "doctor-has-ended").touch()
    assert line_of(process) == ["served"]
    assert line_of(process) == ["well"]
    process.communicate(timeout=PATIENCE)
