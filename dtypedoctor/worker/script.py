"""A process that records itself, from the import of torch to its end: a user's program, or one that it has started.

The program runs as Python runs it, and nothing of this package stands between them. What is here is called when torch has been imported
(:mod:`dtypedoctor.worker.hooked`), when Python shows what ends the program, and by ``atexit``.
"""

import atexit
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtypedoctor.foreign_files import read_file
from dtypedoctor.guardian import make_private_folder
from dtypedoctor.interruptions import contained, say
from dtypedoctor.redaction.redact import REQUEST, public_text
from dtypedoctor.trace.events import NOTHING_WATCHED, NotWatched
from dtypedoctor.trace.ranks import (
    BEFORE,
    FAILURES,
    JOB,
    JOB_FILE,
    LAUNCHERS,
    SWITCH,
    child_directory,
    member,
    place_in_job,
    rank_directory,
)
from dtypedoctor.unpatched import at_audit, from_json, getpid
from dtypedoctor.worker.on_import import no_collection
from dtypedoctor.worker.recording import Recording, move_when_this_process_ends

FIRST_CHILD, LAST_CHILD = 101, 132
"""Numbers of recorded processes that are neither ranks nor numbered by ``multiprocessing``."""
_LAST = -1000
"""Priority of what is done when a process of ``multiprocessing`` ends: after everything that the program has asked for."""
_KEPT: list[object] = []
"""Recorded processes, which ``multiprocessing`` holds weakly."""


def record_this_process(environment: Mapping[str, str]) -> None:
    """Begins to record a process that began in an environment; whatever goes wrong here must not reach the program."""
    with contained() as ours:
        _Process(environment).begin()
    if ours.error is not None:
        say(f"dtypedoctor: this process is not recorded: {type(ours.error).__name__}: {ours.error}")


class _Process:
    """This process, and its place in the job: the first one that comes records in the job's folder, each rank and each further process below it.

    With ``DTYPEDOCTOR=1`` nobody waits for the end of the program. The first process makes the folder then, and has the report written.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._owner = getpid()
        self._environment = environment
        self._is_child = any(word.startswith("from multiprocessing.") for word in sys.orig_argv)
        self._error: BaseException | None = None
        self._recording: ScriptRecording | None = None
        self._writes_report = JOB not in os.environ
        self._job = _new_job(environment) if self._writes_report else Path(os.environ[JOB])

    def begin(self) -> None:
        """Finds its place in the job, and begins."""
        if not self._job.is_dir():  # the run is over and its record has been moved, or lies on another machine
            return
        with suppress(OSError):  # after os.exec the first process is still the one that ends the job
            self._writes_report |= from_json(read_file(self._job.parent / JOB_FILE))["pid"] == self._owner
        # Of a launcher only the failures that it has seen are kept.
        if LAUNCHERS.isdisjoint({os.path.basename(word) for word in sys.orig_argv[1:4]}):
            self._recording = self._claimed(from_json(read_file(self._job / REQUEST)))
            if self._recording is None:
                return
            self._recording.begin()
        at_audit(self._excepted, "sys.excepthook")
        atexit.register(self._end)
        if self._is_child:  # multiprocessing leaves without atexit, and shows exceptions itself
            from multiprocessing import util

            _KEPT.append(self)
            util.register_after_fork(self, _Process._follow_multiprocessing)  # it forgets what there was before
            self._follow_multiprocessing()

    def _follow_multiprocessing(self) -> None:
        from multiprocessing import util

        # multiprocessing calls it while it handles what has left the process's function
        util.Finalize(None, lambda: self._end(sys.exc_info()[1]), exitpriority=_LAST)

    def _claimed(self, request: Mapping[str, Any]) -> "ScriptRecording | None":
        """A recording in the first place that is free; None for a rank that a launcher starts again, and where there are too many."""
        here = member(self._environment)
        if here is not None and place_in_job(self._environment) != request["member"]:
            places = [rank_directory(self._job, here.rank)]
        else:
            places = [] if self._is_child else [self._job]
            places += [child_directory(self._job, number) for number in _numbers_of_child()]
        for place in places:
            place.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                return ScriptRecording(request, place)
        return None

    def _excepted(self, event: str, details: tuple[Any, ...]) -> None:
        """Python is about to show what ends the program, by whatever ``sys.excepthook`` is: recording it hides the watch's own frames before."""
        if event == "sys.excepthook" and getpid() == self._owner:
            self._error = details[2]
            if self._recording is not None:
                self._recording.end(self._error)

    def _end(self, error: BaseException | None = None) -> None:
        if getpid() != self._owner:
            return
        error = self._error or error
        if error is None and hasattr(sys, "last_value"):
            error = SystemExit(1)  # a test runner has shown what failed there, and leaves with a status
        if self._recording is not None:
            self._recording.end(error)
        failures = {
            str(rank): {"code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in getattr(error, "failures", {}).items()
        }
        if failures and type(error).__name__ == "ChildFailedError":  # this is torchrun, which ends for that
            with suppress(OSError):
                (self._job / FAILURES).write_text(json.dumps(failures), encoding="utf-8")
        if self._writes_report:
            # In a process of its own: nothing of it comes into the program's.
            failed = error is not None
            if not self._job.parent.is_dir():
                say(
                    f"dtypedoctor: the program deleted the folder with the records of this run ({self._job.parent}), so nothing is known of it: "
                    "set TMPDIR to a folder that it does not delete"
                )
                return
            job = from_json(read_file(self._job.parent / JOB_FILE)) | {"failed": failed}
            _tell(self._job.parent, job)
            command = [sys.executable, "-m", "dtypedoctor", "job-report", str(self._job.parent), "--to", job["to"]]
            environment = {name: value for name, value in os.environ.items() if name not in (SWITCH, JOB)}
            sys.stdout.flush()
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=2, check=False)


def _numbers_of_child() -> Iterator[int]:
    """How a process that is no rank may be numbered, first as ``multiprocessing`` does: "SpawnProcess-2"."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    number = re.search(r"-(\d+)$", multiprocessing.current_process().name) if multiprocessing is not None else None
    if number is not None and int(number[1]) < FIRST_CHILD:
        yield int(number[1])
    yield from range(FIRST_CHILD, LAST_CHILD + 1)


def _new_job(environment: Mapping[str, str]) -> Path:
    """Makes the private folder of a job that has begun by itself, tells the processes of it, and starts what moves it if this one is killed.

    Its record is going to lie in ``runs/NAME-TIME``, or where ``DTYPEDOCTOR_RUNS`` says, with the name of the first script on the command line.
    """
    scripts = (word for word in sys.orig_argv[1:] if word.endswith(".py"))
    name = re.sub(r"[\W_]+", "-", os.path.basename(next(scripts, sys.argv[0])).removesuffix(".py").lower()).strip("-")
    runs = os.path.abspath(os.environ.get("DTYPEDOCTOR_RUNS") or "runs")
    wanted = os.path.join(runs, f"{name or 'program'}-{time.strftime('%Y%m%d-%H%M%S')}")
    script = os.path.dirname(os.path.abspath(sys.argv[0]))
    folder = make_private_folder(name or "program", [os.getcwd(), script], os.getcwd())
    move_when_this_process_ends(folder, wanted)
    job = Path(folder, BEFORE)
    job.mkdir()
    (job / REQUEST).write_text(
        public_text(json.dumps(request_of(sys.argv, place_in_job(environment)))), encoding="utf-8"
    )
    _tell(job.parent, {"argv": sys.orig_argv, "failed": False, "pid": getpid(), "to": wanted})
    os.environ[JOB] = str(job)
    return job


def _tell(folder: Path, job: Mapping[str, Any]) -> None:
    (folder / JOB_FILE).write_text(json.dumps(job), encoding="utf-8")


def request_of(argv: list[str], place: str) -> dict[str, object]:
    """The request that ``exec`` would have made for this process."""
    return {
        "scenario": {
            "name": "job",
            "summary": "A program, run unchanged.",
            "deterministic": False,
            "overhead_budget": "auto",
            "steps": [{"workload": {"kind": "script", "path": argv[0] or "-", "args": argv[1:]}}],
        },
        "watch": True,
        "replay": True,
        "capsule_limit": 64 << 20,
        "member": place,
    }


class ScriptRecording:
    """The recording of a program in this process, in which torch has been imported.

    Args:
        request: the decoded request file.
        directory: where the trace lies.

    Raises:
        FileExistsError: there is one already.
    """

    def __init__(self, request: Mapping[str, Any], directory: Path) -> None:
        self._request = request
        self._recording = Recording(directory, watched=request["watch"])

    def begin(self) -> None:
        """Starts the instruments that the request asks for."""
        writer = self._recording.writer
        self._recording.follow_program("script")
        with no_collection(), contained() as ours:  # a defect of ours must not end the program
            # The watch that a request asks for; torch is there
            from dtypedoctor.instrument.budget import budget_of
            from dtypedoctor.instrument.silent.error_budget import ErrorBudget
            from dtypedoctor.worker.environment import StepDigest
            from dtypedoctor.worker.process_watch import ProcessWatch

            scenario, changes = self._request["scenario"], None
            if self._request.get("changes"):  # whoever asks for them says what makes them
                from dtypedoctor.plugins import resolve

                changes = resolve(self._request["changes"])(writer, scenario)
            watch = ProcessWatch(
                writer,
                watch=self._request["watch"],
                budget=budget_of(scenario.get("overhead_budget", "off")),
                changes=changes,
                digest=StepDigest() if self._request.get("witness") else None,
            )
            self._recording.torch_is_there(watch)
            watch.instruments.checks[ErrorBudget].is_asked_for = bool(self._request.get("error_budget"))
            watch.start()
            if self._request["replay"]:
                watch.instruments.replay_failures(self._request["capsule_limit"])
        if ours.error is not None:
            writer.write(NotWatched(what=NOTHING_WATCHED, why=f"{type(ours.error).__name__}: {ours.error}"))

    def end(self, error: BaseException | None) -> None:
        """The program has come to its end, with ``error`` if it is one; in a child that it has forked that means nothing."""
        if not self._recording.active:
            return
        self._recording.end(error)
