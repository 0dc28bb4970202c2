"""What ``exec`` does once its arguments are read: it starts the script, and then imports what reads the trace while that runs.

On one of several machines, which all name one folder, the report there tells of the ranks of all.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.foreign_files import open_file, read_settings, write_file
from dtypedoctor.interruptions import say
from dtypedoctor.redaction.redact import REQUEST
from dtypedoctor.replay.capsule import Capsule
from dtypedoctor.replay.own import mark_as_own
from dtypedoctor.runner.command import Program
from dtypedoctor.runner.directories import RecordFolder, make_directory, removed_if_refused
from dtypedoctor.runner.process import Guardian, outliving, run_script
from dtypedoctor.trace.events import NOT_HERE, WORKED_ELSEWHERE, Coverage, NotWatched, Raised
from dtypedoctor.trace.ranks import BEFORE, LAUNCHERS, NODE, node_directories

if TYPE_CHECKING:
    from dtypedoctor.examination.examine import Attempt
    from dtypedoctor.examination.results import Treatment
    from dtypedoctor.report.to_json import Report
    from dtypedoctor.runner.run import Run


def record_script(
    program: Program, folder: RecordFolder, *, capsule_limit: int, rerun: str, tries_edits: bool
) -> "tuple[Report, int]":
    """Runs a user's program once, with this process's streams, and diagnoses it.

    Args:
        program: what to run.
        folder: where everything that is found out is kept. It arrives when the program has ended and the report is written.
        capsule_limit: bytes that the capsule of a failing call may take.
        rerun: how ``exec`` is asked for another run.
        tries_edits: run it again with the edits that may be shown.

    Returns:
        The report, and the program's own exit status as a shell would give it.

    Raises:
        UsageError: there is no such script, or the directory cannot be used. The directory is gone then, unless something else lies in it.
    """
    with guarded(folder) as guardian:
        checkpoints = [word for word in program.args if os.path.isdir(word.partition("=")[2] or word)]
        if checkpoints:  # they are read before the script may change them
            from dtypedoctor.examination.examine import checkpoints_among, stand_out

            static = stand_out(checkpoints_among(checkpoints))
        run = first_run(program, program.request(capsule_limit), folder, guardian)
        from dtypedoctor.examination.examine import examine
        from dtypedoctor.examination.processes import Leading

        treatment = examine(
            program.described(),
            Leading()(run),
            static=static if checkpoints else (),
            capsule_limit=capsule_limit,
            rerun=rerun,
            attempt=edited_runs(_as_seen(program, run), folder, guardian) if tries_edits else None,
        )
        return finished(treatment, folder)


def _as_seen(program: Program, run: "Run") -> Program:
    """The program, whose steps are all looked at again if at least half of them were: which ones the time pays for differs from run to run, and what is not seen is no cure."""
    counted = run.trace.last(Coverage) or Coverage()
    seen, skipped = counted.module_calls + counted.gradients, counted.module_calls_skipped + counted.gradients_skipped
    return program if skipped > seen else replace(program, overhead_budget="off")


def edited_runs(program: Program, folder: RecordFolder, guardian: Guardian) -> "Attempt":
    """What runs a program again with some of its files edited, alone, after its first run."""

    def attempt(label: str, edited: Mapping[str, str], seconds: int) -> "Run | str":
        from dtypedoctor.examination.processes import Leading
        from dtypedoctor.runner.view import NoViewError, View

        say("dtypedoctor: running the script again with an edit, in a copy of its files and without network …")
        again = {
            **program.request(0),
            "error_budget": False,
            "capsule_limit": None,
            "repeats": "before",
            "repeatable": True,
        }
        try:
            began = (folder.private / BEFORE / REQUEST).stat().st_mtime
            with View(Path.cwd(), began).before(folder.private / label, edited) as words:
                run = run_script(
                    program.words,
                    again,
                    folder.private / label,
                    live=False,
                    time_limit=min(seconds, program.time_limit),
                    through=words,
                    guardian=guardian,
                )
            return Leading()(run)
        except (NoViewError, DoctorError, OSError) as error:
            return str(error)
        finally:  # what it has shown is in the report
            shutil.rmtree(folder.private / label, ignore_errors=True)

    return attempt


@contextmanager
def guarded(folder: RecordFolder) -> Iterator[Guardian]:
    """Inside, what is run ends with this process, and the record arrives in the end, even if this process is killed."""
    is_moved = folder.private != folder.directory
    guarding = Guardian(folder.private, folder.directory, merge=folder.merge) if is_moved else Guardian()
    with guarding as guardian, arriving(folder), outliving():
        yield guardian


def first_run(program: Program, request: Mapping[str, Any], folder: RecordFolder, guardian: Guardian) -> "Run":
    """Runs a program with this process's streams, terminal and signals.

    Raises:
        UsageError: it cannot be started, or did nothing but to reject how it was typed.
    """
    try:
        run = run_script(
            program.words,
            request,
            folder.private / "before",
            live=True,
            time_limit=program.time_limit,
            meanwhile=_import_the_rest,
            guardian=guardian,
        )
    except OSError as error:
        hint = "Give a script of Python, or a program: a file without `#!` in its first line is run by `sh FILE`."
        raise UsageError(f"{program.words[0]} cannot be run here: {error.strerror or error}", hint) from error
    # One that raises KeyboardInterrupt by itself has failed.
    if run.exit.asked_to_end == signal.SIGINT and not any(one.trace.samples for one in (run, *run.ranks)):
        raise KeyboardInterrupt
    if run.exit.code == _USAGE and folder.private != folder.directory and not _measured_anything(run):
        shutil.rmtree(folder.private, ignore_errors=True)
        raise UsageError(
            f"the script ended with status {_USAGE} before anything could be measured: nothing was recorded",
            "It says above what it expects. Options of the script stand after it.",
        )
    folder.private.mkdir(exist_ok=True)  # the program may have deleted it
    return run


_USAGE = 2
"""How programs end that are typed wrong: argparse, click, a shell."""


def _measured_anything(run: "Run") -> bool:
    """Whether any of the processes did what can be measured, or may have done it unseen."""
    from dtypedoctor.report.verdict import measured_in

    traces = [one.trace for one in (run, *run.ranks, *run.others)]
    unseen = [
        note.why for trace in traces for note in trace.all(NotWatched) if note.why in (NOT_HERE, WORKED_ELSEWHERE)
    ]
    return bool(unseen) or any(trace.last(Raised) for trace in traces) or measured_in(traces).ran


def finished(
    treatment: "Treatment", folder: RecordFolder, *, patch: str = "", applied: bool = False
) -> "tuple[Report, int]":
    """The report, which is written into the folder, and the program's own exit status as a shell would give it; see :func:`reported`."""
    from dtypedoctor.cli.reported import reported

    code = treatment.before.exit.code
    if isinstance(treatment.capsule, Capsule):
        mark_as_own(treatment.capsule.directory)
    folder.reserve()
    report = reported(treatment, folder.private, shown=folder.directory, patch=patch, applied=applied)
    return report, code if code >= 0 else 128 - code


def _import_the_rest() -> None:
    """Imports what reads a trace and shows a report, rules included; the second time there is nothing to do."""
    for name in ("cli.reported", "examination.examine", "report.to_terminal"):
        import_module(f"dtypedoctor.{name}")
    import_module("dtypedoctor.diagnosis").rules()


@contextmanager
def arriving(folder: RecordFolder) -> Iterator[None]:
    """Moves the record to its directory at the end, unless nothing could be run, or nothing was measured before Ctrl-C."""
    try:
        with removed_if_refused(folder.private, folder.directory):
            yield
    finally:
        folder.arrive()


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """What a launcher's options say of several machines.

    Attributes:
        most: how many there are; with ``--nnodes MIN:MAX`` at most.
        number: of this one, where the options say it.
        meeting: what is the same on all of them: the id of the rendezvous, and the port of its endpoint.
    """

    most: int
    number: int | None
    meeting: str


_COUNT, _NUMBER = ("nnodes", "num_machines", "num_nodes"), ("node_rank", "machine_rank")
_ENDPOINT = ("rdzv_endpoint", "master_port", "main_process_port")
"""Options of torchrun, accelerate and deepspeed that mean the same."""


def nodes_of(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> Nodes | None:
    """The machines that the options of a launcher's command, or torchrun's variables in their place, name; None where it is one, or no launcher."""
    if LAUNCHERS.isdisjoint({os.path.basename(word) for word in command[:3]}):
        return None
    script = next((at for at, word in enumerate(command) if word.endswith(".py")), len(command))
    variables = {
        name.removeprefix("PET_").lower(): value
        for name, value in environment.items()
        if value and name.startswith("PET_")
    }
    options = variables | dict(_options(command[:script]))

    def value(names: Sequence[str]) -> str:
        return next((options[name].rpartition(":")[2] for name in names if name in options), "")

    most, number = value(_COUNT), value(_NUMBER)
    if not most.isdecimal() or int(most) < 2:
        return None
    meeting = (
        f"{value(['rdzv_id'])}:{value(_ENDPOINT)}"  # without the host, which each machine may call by another name
    )
    return Nodes(most=int(most), number=int(number) if number.isdecimal() else None, meeting=meeting)


def _options(launcher: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of a launcher, with underscores in their names, and the value of each, if it has one."""
    for word, following in zip(launcher, [*launcher[1:], ""], strict=True):
        option, equals, behind = word.partition("=")
        if option.startswith("-"):
            yield option.lstrip("-").replace("-", "_"), behind if equals else following


def treated_together(
    folder: Path, nodes: Nodes, program: Sequence[str], treat: "Callable[[Path], tuple[Report, int]]"
) -> "tuple[Report, int]":
    """Treats a job in this machine's own directory of ``folder``, and writes the report on all that is there by then into ``folder``.

    Args:
        folder: the same on all machines, if they have it in common.
        nodes: what the launcher's options say of the machines.
        program: the script and its arguments.
        treat: what is done in a new directory; the report on this machine's ranks and the script's exit status.

    Raises:
        UsageError: the folder cannot be used; or what ``treat`` raises.
    """
    job = {"nodes": nodes.most, "meeting": nodes.meeting, "program": list(program)}
    own = enter(folder, job, nodes.number)
    with ExitStack() as refused:
        refused.callback(leave, folder)
        report, status = treat(own)
        refused.pop_all()
    try:
        wait_for_others(folder)
    except KeyboardInterrupt:
        say("dtypedoctor: not waiting for the other machines")
    try:
        return _on_all(folder), status
    except DoctorError as error:
        say(f"dtypedoctor: this report tells of the ranks of this machine only: {error.message}")
        return report, status


def _on_all(folder: Path) -> "Report":
    """The report on the ranks of all machines that have recorded in the folder up to now."""
    from dtypedoctor.cli.reported import as_typed_here, kept
    from dtypedoctor.report.files import report_of_machines

    with alone(folder):
        report = report_of_machines([folder], own_files=True)
        return kept(folder, replace(report, next_command=as_typed_here(report.next_command)))


JOB = "nodes.json"
"""What the job is, in its folder."""
PROCESS = "node.json"
"""Which process records a node, in the node's directory."""
SECONDS = 15.0
"""How long a machine waits for the reports of the others: healthy ranks end within a second of each other."""


def enter(folder: Path, job: dict[str, Any], number: int | None) -> Path:
    """Makes this machine's directory in the folder of a job.

    Args:
        folder: of the job; made by the first machine that comes.
        job: what has to be the same on all machines; ``nodes`` is how many there may be.
        number: of this machine; None for the first that is free.

    Raises:
        UsageError: the folder holds something else, or this machine's directory, or the job has ended, or a folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if all(path.name.startswith(f".{JOB}.") for path in folder.iterdir()):  # what others are about to name so
            _write_once(folder / JOB, job)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be created ({error.strerror})", "Give a writable --out.") from error
    other = "A run is never overwritten; give another --out, the same one on each machine of the job."
    if read_settings(folder / JOB) != job:
        raise UsageError(f"{folder}: already exists, and is not of this job", other)
    nodes = node_directories(folder)
    ended = [place.name for place in nodes if is_over(place)]
    if ended:
        raise UsageError(f"{folder}: this job has ended already ({', '.join(ended)})", other)
    if number is None and len(nodes) >= job["nodes"]:
        raise UsageError(f"{folder}: all {job['nodes']} machines of this job record here already", other)
    place = _made(folder, number)
    _write_once(place / PROCESS, {"boot": _boot(), "pid": os.getpid()})
    return place


def _made(folder: Path, number: int | None) -> Path:
    if number is not None:
        place = folder / f"{NODE}{number}"
        make_directory(place)
        return place
    for free in count():
        with contextlib.suppress(FileExistsError):
            place = folder / f"{NODE}{free}"
            place.mkdir()
            return place
    raise AssertionError  # count() has no end


def leave(folder: Path) -> None:
    """Takes the folder of a job away again where no machine records in it."""
    with contextlib.suppress(OSError):
        if not node_directories(folder):
            (folder / JOB).unlink()
            folder.rmdir()


def is_over(node: Path) -> bool:
    """Whether a machine has written its report."""
    return (node / "report.json").exists()


def wait_for_others(folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when every machine that records in the folder has written its report, or was killed here, or after :data:`SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and not all(map(_is_done, node_directories(folder))):
        sleep(0.1)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other machine is inside; where the file system has no locks, all may be."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open_file(folder / JOB))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_done(node: Path) -> bool:
    """Whether a machine has written its report, or the process that recorded it was one of this machine and is gone."""
    told = read_settings(node / PROCESS)
    return is_over(node) or (told.get("boot") == _boot() and not Path("/proc", str(told.get("pid"))).exists())


def _boot() -> str:
    """Identifies this machine until it starts again, and nobody."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _write_once(path: Path, content: dict[str, Any]) -> None:
    """Writes a file as a whole, unless it is there already."""
    with contextlib.suppress(FileExistsError):
        write_file(path, json.dumps(content), replace=False)
