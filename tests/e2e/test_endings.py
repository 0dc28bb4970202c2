"""However a run ends, its exit code is that of one table: 3 is for a run of which no trace is left, and for nothing else."""

import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from command import dtypedoctor, report_of
from patience import PATIENCE, becomes

from dtypedoctor.cli.reported import ENDINGS, exit_code
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.errors import ExitCode
from dtypedoctor.report.to_json import Observer, Report, Status

HEALTHY = Report(name="run", status=Status.HEALTHY, headline="")
NOTE = Finding(id="update-stall", severity=Severity.INFO, confidence=Confidence.PROVEN, fqn=None, op=None, phase="forward", step=1, dtype=None,
               source=None, summary="", cause="")  # fmt: skip
ERROR = replace(NOTE, severity=Severity.ERROR)
REPORTS = {
    "no usable trace, and no finding without one": [
        replace(HEALTHY, status=status, trace_usable=False) for status in Status
    ],
    "fails and is fixed as the scenario says": [
        replace(HEALTHY, status=Status.FINDINGS, findings=(ERROR,), expectation_met=True)
    ],
    "not what the scenario says": [replace(HEALTHY, expectation_met=False)],
    "a bisection of what fails": [replace(HEALTHY, bisection={"end": "interrupted"})],
    "a finding that is more than a note": [
        replace(HEALTHY, status=Status.FINDINGS, findings=(NOTE, ERROR)),
        replace(HEALTHY, status=Status.WORKER_DIED, findings=(ERROR,), trace_usable=False),
    ],
    "killed, stopped, raised, status not 0, not measured": [
        replace(HEALTHY, status=status) for status in Status if status not in (Status.HEALTHY, Status.FINDINGS)
    ],
    "differs without instrumentation": [replace(HEALTHY, observer=Observer(bitwise_equal=False, reason=""))],
    "nothing wrong": [HEALTHY, replace(HEALTHY, findings=(NOTE,)), replace(HEALTHY, bisection={"end": "healthy"})],
}


@pytest.mark.parametrize("row", ENDINGS, ids=lambda row: row[0])
def test_each_exit_code_belongs_to_the_reports_that_its_row_of_the_table_names(
    row: tuple[str, object, ExitCode],
) -> None:
    """The first that holds, and no status is left without a row."""
    words, _, code = row
    for report in REPORTS[words]:
        assert next(name for name, holds, _ in ENDINGS if holds(report)) == words
        assert exit_code(report) == code


SCRIPTS = {
    "status 0, nothing to measure": ("print(1)", 10, "unknown"),
    "status 7": ("import sys; sys.exit(7)", 10, "error"),
    "os._exit": ("import os; os._exit(5)", 10, "error"),
    "an exception": ("raise ValueError('no')", 10, "error"),
    "abort": ("import os; os.abort()", 10, "worker-died"),
    "a null pointer": ("import ctypes; ctypes.string_at(0)", 10, "worker-died"),
    "SIGKILL": ("import os; os.kill(os.getpid(), 9)", 10, "worker-died"),
    "SIGTERM": ("import os; os.kill(os.getpid(), 15)", 10, "worker-died"),
    "Ctrl-C": ("raise KeyboardInterrupt", 10, "error"),
    "the time limit": ("import pathlib, time; pathlib.Path('hangs').touch(); time.sleep(2000)", 10, "worker-died"),
    "its record is gone": ("import glob, os, shutil; shutil.rmtree(*glob.glob(os.environ['TMPDIR'] + '/*'))", 3, ""),
}
"""How a script ends, the exit code of the doctor, and the status in its report."""


@pytest.mark.parametrize("ending", SCRIPTS)
def test_a_script_that_ends_in_any_way_ends_with_the_code_of_the_table(ending: str, tmp_path: Path) -> None:
    """The real command line; the report says what the exit code stands for."""
    source, code, status = SCRIPTS[ending]
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    (work / "work.py").write_text(textwrap.dedent(source))
    paths = {"TMPDIR": str(elsewhere)}
    late = work / "hangs" if ending == "the time limit" else None
    command = ("exec", "--out", tmp_path / "run", "--time-limit", "1000", work / "work.py")
    finished = dtypedoctor(*command, cwd=work, late_with=late, **paths)
    assert finished.code == code, finished.err
    assert "dtypedoctor itself failed" not in finished.err
    if status:
        report = report_of(tmp_path / "run")
        assert (report["status"], report["trace_usable"]) == (status, code != 3)


MEASURED = "import os, sys, time, torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
GOES_ON = {
    "os._exit": ("os._exit(0)", "the script ended without Python's shutdown"),
    "exec": ("os.execv('/bin/true', ['true', 'next.py'])", "the script became another program, which was not measured: exec of true next.py"),
    "a daemon": (
        "if os.fork():\n    sys.exit(0)\nos.setsid()\nif os.fork():\n    os._exit(0)\nos.close(1)\nos.close(2)\ntime.sleep(300)",
        "but not measured: process",
    ),
    "a process of its group": ("if not os.fork():\n    os.close(1)\n    os.close(2)\n    time.sleep(300)", "but not measured: process"),
}  # fmt: skip
"""What a script does last that leaves work unmeasured though its status is 0, and what is said of it."""


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("ending", GOES_ON)
def test_a_script_whose_end_was_not_seen_is_never_healthy(ending: str, tmp_path: Path) -> None:
    """No end record is *unknown*, and so is a process with torch that goes on; what was not measured is named."""
    source, said = GOES_ON[ending]
    (tmp_path / "work.py").write_text(MEASURED + source)
    finished = dtypedoctor("exec", "--out", tmp_path / "run", "work.py", cwd=tmp_path)
    assert finished.code == 10, finished.err
    report = report_of(tmp_path / "run")
    assert report["status"] == "unknown"
    assert said in report["headline"]


SCENARIO = """\
name: one
summary: A forward pass.
steps:
  - model: {name: "builtin:llama-tiny"}
    workload: {kind: forward}
"""


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return list(map(int, found.split()))


def servers_of(process: int) -> list[int]:
    """The fork server among the children of a process, beside what tracks its resources and what ends it."""
    servers = []
    for child in children_of(process):
        with suppress(OSError):  # it has ended meanwhile
            if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes():
                servers.append(child)
    return servers


def has_ended(process: int) -> bool:
    """Whether nothing of it is left but what its parent has to ask for: not each machine's first process does."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_while_torch_is_imported_ends_what_imports_it(number: signal.Signals, tmp_path: Path) -> None:
    """The server of workers would see only after its imports that nobody is there any more."""
    (tmp_path / "one.yaml").write_text(SCENARIO)
    command = [sys.executable, "-m", "dtypedoctor", "run", "one.yaml", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert any("importing torch" in line for line in run.stderr)
        assert becomes(lambda: servers_of(run.pid))
        [server] = servers_of(run.pid)
        run.send_signal(number)
        assert run.wait(PATIENCE) == 130
    assert becomes(lambda: has_ended(server))
    assert not (tmp_path / "out").exists()
