"""What a process does first where ``dtypedoctor enable`` has been called and ``DTYPEDOCTOR=1`` is set: it waits for torch, and then records itself.

Executed by its path from a ``.pth`` file, in any Python process of the environment. A process that never imports torch gets one finder
on ``sys.meta_path`` and nothing else. The first process of a job that imports torch makes a private folder for the records, tells the processes
that it starts by an environment variable, and has the report written when it ends, in the run directory to which the records are moved then.
"""

import atexit
import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is not imported for a program
    from pathlib import Path
    from types import TracebackType

    from dtypedoctor.worker.script import ScriptRecording

SWITCH = "DTYPEDOCTOR"
JOB = "DTYPEDOCTOR_JOB"
"""Environment variable with the private folder in which the processes of a job are recorded."""
JOB_FILE = "job.json"
"""What the first process was started with, in the run directory, for the report."""
BEFORE, FAILURES = "before", "failures.json"
FIRST_CHILD, LAST_CHILD = 101, 132
"""Numbers of processes that are neither ranks nor spawned by multiprocessing: they are recorded as further children."""
_NOT_PROGRAMS = ("compile_worker", "--multiprocessing-fork", "multiprocessing.")
"""In the arguments of processes that compile, that their parent has recorded, or that only track resources."""


def wait_for_torch() -> None:
    """Has this process recorded from the moment at which it has imported torch; does nothing in dtypedoctor's own processes."""
    words = sys.orig_argv
    if "dtypedoctor.worker.on_import" in sys.modules:
        return  # in a virtual environment Python executes each .pth file twice; or this process is a treated one
    if any(part in word for word in words for part in _NOT_PROGRAMS) or _is_ours(words):
        return
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.append(home)
    try:
        from dtypedoctor.worker.on_import import after_import
    finally:
        sys.path.remove(home)
    after_import("torch", _begin)


def _is_ours(words: "list[str]") -> bool:
    """Whether dtypedoctor records this process already, or it is dtypedoctor."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    return any(
        word.startswith(package) or os.path.basename(word) == "dtypedoctor" or word == "dtypedoctor"
        for word in words[:4]
    )


def _begin() -> None:
    from dtypedoctor.interruptions import contained

    with contained() as ours:  # whatever goes wrong here must not reach the program
        _Process().begin()
    if ours.error is not None:
        print(f"dtypedoctor: this process is not recorded: {ours.error}", file=sys.stderr)


class _Process:
    """This process, from the import of torch to its end."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._error: BaseException | None = None
        self._recording: ScriptRecording | None = None
        self._job = ""
        self._wanted = ""
        self._is_first = False

    def begin(self) -> None:
        """Finds its place in the job and begins to record."""
        from pathlib import Path

        from dtypedoctor.redaction.redact import write_request_file
        from dtypedoctor.worker.script import ScriptRecording

        is_new = JOB not in os.environ
        if is_new:
            self._wanted = _run_directory()
            self._job = _new_job(self._wanted)
        else:
            self._job = os.environ[JOB]
            if not os.path.isdir(self._job):  # the job is over, and its record has been moved
                return
            with open(os.path.join(self._job, JOB_FILE), encoding="utf-8") as file:
                first = json.load(file)
            self._wanted = first["to"]
        # After os.exec the first process is still the one that ends the job.
        self._is_first = is_new or first["pid"] == self._owner
        place = _place(Path(self._job, BEFORE), is_first=is_new)
        if place is None:
            return
        if is_new:
            os.environ[JOB] = self._job
            self._tell(failed=False)
        request = request_of(sys.argv)
        write_request_file(place, json.dumps(request))
        self._follow_exceptions()
        atexit.register(self._end)
        self._recording = ScriptRecording(request, place)
        self._recording.begin()

    def _follow_exceptions(self) -> None:
        """Remembers what ends the program; a status that it leaves with by ``sys.exit`` cannot be seen from inside."""
        shown = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, traceback: "TracebackType | None") -> None:
            self._error = error
            if self._recording is not None:
                self._recording.end(error)  # hides the watch's own frames from the traceback
            shown(kind, error, error.__traceback__)

        sys.excepthook = hook

    def _end(self) -> None:
        if os.getpid() != self._owner or self._recording is None:
            return
        self._recording.end(self._error)
        if self._is_first:
            self._write_report()

    def _tell(self, *, failed: bool) -> None:
        with open(os.path.join(self._job, JOB_FILE), "w", encoding="utf-8") as file:
            json.dump({"argv": sys.orig_argv, "failed": failed, "pid": self._owner, "to": self._wanted}, file)

    def _write_report(self) -> None:
        """In a process of its own: nothing of it comes into the program's."""
        import subprocess

        if not os.path.isdir(self._job):
            print(
                f"dtypedoctor: the program deleted the folder with the records of this run ({self._job}), so nothing is known of it: "
                "set TMPDIR to a folder that it does not delete",
                file=sys.stderr,
            )
            return
        self._tell(failed=self._error is not None)
        failures = _failures(self._error)
        if failures:
            with open(os.path.join(self._job, BEFORE, FAILURES), "w", encoding="utf-8") as file:
                json.dump(failures, file)
        command = [sys.executable, "-m", "dtypedoctor", "job-report", self._job, "--to", self._wanted]
        environment = {name: value for name, value in os.environ.items() if name not in (SWITCH, JOB)}
        sys.stdout.flush()
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=2, check=False)


def _run_directory() -> str:
    """Where the record is going to lie: ``runs/NAME-TIME`` in the working directory, or where ``DTYPEDOCTOR_RUNS`` says."""
    folder = os.path.abspath(os.environ.get("DTYPEDOCTOR_RUNS") or "runs")
    return os.path.join(folder, f"{_job_name()}-{time.strftime('%Y%m%d-%H%M%S')}")


def _new_job(wanted: str) -> str:
    """Makes the private folder of a job; what moves it to ``wanted`` where this process is killed is started."""
    from dtypedoctor.guardian import make_private_folder
    from dtypedoctor.worker.recording import move_when_this_process_ends

    script = os.path.dirname(os.path.abspath(sys.argv[0]))
    job = make_private_folder(_job_name(), [os.getcwd(), script], os.getcwd())
    move_when_this_process_ends(job, wanted)
    return job


def _job_name() -> str:
    """The name of the first script on the command line, in lower case, with dashes for what a file name had better not have."""
    scripts = (word for word in sys.orig_argv[1:] if word.endswith(".py"))
    name = os.path.basename(next(scripts, sys.argv[0])).removesuffix(".py").lower()
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    return plain.strip("-") or "program"


def _place(directory: "Path", *, is_first: bool) -> "Path | None":
    """Where this process records; None for one that a launcher starts again, and where there are too many."""
    from dtypedoctor.trace.ranks import child_directory, member_of_torchrun, rank_directory

    here = member_of_torchrun()
    if here is not None:
        candidates = [rank_directory(directory, here.rank)]
    elif is_first:
        candidates = [directory]
    else:
        candidates = [child_directory(directory, number) for number in range(FIRST_CHILD, LAST_CHILD + 1)]
    for place in candidates:
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            continue
        return place
    return None


def request_of(argv: "list[str]") -> "dict[str, object]":
    """The request that ``exec`` would have made for this process, without pydantic, which would be imported for it."""
    return {
        "scenario": {
            "name": "job",
            "summary": "A program, run unchanged.",
            "deterministic": False,
            "watch_every": 1,
            "overhead_budget": "off",
            "corrections": [],
            "conditions": [],
            "steps": [{"workload": {"kind": "script", "path": argv[0] or "-", "args": argv[1:]}}],
        },
        "watch": True,
        "replay": True,
        "capsule_limit": 64 << 20,
        "repeats": None,
        "witness": False,
    }


def _failures(error: BaseException | None) -> "dict[str, dict[str, float]]":
    """Which ranks torchrun saw fail, where this process is torchrun and ends for that."""
    if type(error).__name__ != "ChildFailedError":
        return {}
    return {
        str(rank): {"code": failure.exitcode, "time": failure.timestamp}
        for rank, failure in getattr(error, "failures", {}).items()
    }


if __name__ == "dtypedoctor-hook":
    wait_for_torch()
