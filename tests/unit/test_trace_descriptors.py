"""A program may close, replace and inherit any descriptor: its files get what it writes, and the trace gets the records."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from patience import PATIENCE

from dtypedoctor.trace.events import Root
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace

PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from dtypedoctor.trace.events import End, Header, Root
from dtypedoctor.trace.writer import TraceWriter

place, own = Path(sys.argv[1]), Path(sys.argv[2])
os.chdir(place)
writer = TraceWriter(Path("trace"))
writer.write(Header())
os.register_at_fork(after_in_child=writer.disown)

def record(name):
    writer.mark(1, 1, 1)
    writer.write(Root(root=0, cls=name, modules=1, dtypes={{}}))

def ours():
    "Numbers of the descriptors that lead to the trace."
    found = [(name, os.path.realpath(f"/proc/self/fd/{{name}}")) for name in os.listdir("/proc/self/fd")]
    return [int(name) for name, where in found if str(place) in where]

def files_everywhere():
    "Opens files until every number that we had, and each below, is the program's."
    while True:
        mine.append(os.open(own, os.O_RDWR | os.O_CREAT | os.O_APPEND))
        if mine[-1] >= max(taken):
            return

record("before")
taken, mine = ours(), []
{middle}
record("after")
writer.write(End(n=writer.next_n(), outcome="completed", steps_completed=0))
writer.close()
for number in mine:
    os.write(number, b"mine")
"""

HARMS = {
    "closerange(3, 256)": "os.closerange(3, 256); files_everywhere()",
    "closerange(0, 4096)": "os.chdir('/'); os.closerange(0, 4096); files_everywhere()",
    "every descriptor that is listed": (
        "for name in os.listdir('/proc/self/fd'):\n    if int(name) > 2 and os.path.exists(f'/proc/self/fd/{name}'): os.close(int(name))\n"
        "files_everywhere()"
    ),
    "dup2": "number = os.open(own, os.O_RDWR | os.O_CREAT)\nfor one in taken: mine.append(os.dup2(number, one))",
    "daemon": (
        "if os.fork(): os.waitpid(-1, 0)\nelse:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    os.closerange(0, 4096); files_everywhere(); record('in the daemon'); os._exit(0)"
    ),
    "fork": "if os.fork(): os.wait()\nelse: record('in the child'); writer.close(); os._exit(0)",
    "fork of a C library": "if ctypes.CDLL(None).fork(): os.wait()\nelse: record('in the child'); writer.close(); os._exit(0)",
}


def finished(tmp_path: Path, middle: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    (tmp_path / "trace").mkdir()
    script, own = tmp_path / "program.py", tmp_path / "own.bin"
    script.write_text(dedent(PROGRAM.format(middle=middle)))
    done = subprocess.run(
        [sys.executable, script, tmp_path, own], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return done, own


def records(trace: Trace) -> list[str]:
    return [one.cls for one in trace.all(Root)]


@pytest.mark.parametrize("harm", HARMS)
def test_no_record_gets_into_a_file_of_the_program(tmp_path: Path, harm: str) -> None:
    """Whatever becomes of the descriptors, the trace is whole and no other process's, and the program's file holds its own bytes."""
    forks = "fork" in HARMS[harm]
    done, own = finished(tmp_path, HARMS[harm])
    assert done.returncode == 0, done.stderr
    trace = read_trace(tmp_path / "trace")
    assert trace.damage == ()
    assert records(trace) == ["before", "after"]
    assert trace.end is not None
    if not forks:
        assert set(own.read_bytes()) <= set(b"mine")
        assert own.read_bytes()


@pytest.mark.parametrize("gone", ["os.remove('trace/events.jsonl')", "os.replace(own, 'trace/events.jsonl')"])
def test_recording_ends_in_silence_where_the_file_is_gone(tmp_path: Path, gone: str) -> None:
    """Without its descriptor and its file nothing is recorded, nothing is printed, and the cursor's page says so."""
    middle = f"own.write_bytes(b'own'); {gone}; os.closerange(3, 4096)"
    done, _ = finished(tmp_path, middle)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if "remove" in gone:
        (tmp_path / "trace" / "events.jsonl").touch()
    trace = read_trace(tmp_path / "trace")
    assert trace.stopped is not None
    assert trace.stopped.lost >= 2


def test_nothing_that_the_program_has_replaced_is_called(tmp_path: Path) -> None:
    """``json.dumps = orjson.dumps`` and its like, before or after the import, change no record."""
    middle = """
    import builtins, io, json, mmap, threading, time
    def broken(*_, **__): raise SystemError("not for others")
    for owner, names in {json: "dumps loads dump load", os: "open write read close fstat getpid", builtins: "open print",
                         io: "open", time: "time perf_counter monotonic sleep", mmap: "mmap",
                         threading: "Lock RLock Thread"}.items():
        for name in names.split(): setattr(owner, name, broken)
    """
    done, _ = finished(tmp_path, dedent(middle))
    assert done.returncode == 0, done.stderr
    assert records(read_trace(tmp_path / "trace")) == ["before", "after"]
