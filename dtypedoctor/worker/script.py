"""A worker for a user's script: the same process does what ``python script.py`` would, with the watch around it.

Nothing heavy is imported here. The instruments come in when the script itself has imported torch, so environment variables
that it sets before that are heeded, and a script without torch pays nothing.
"""

import os
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.interruptions import contained, noticing
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.redaction.redact import read_request
from dtypedoctor.trace.events import (
    NO_TORCH,
    NOT_HERE,
    NOTHING_WATCHED,
    End,
    NotWatched,
    Raised,
    Refused,
    Resources,
    Stage,
)
from dtypedoctor.trace.ranks import STREAMS, header, member, rank_directory
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.unpatched import from_json, getpid, perf_counter
from dtypedoctor.worker import main_module
from dtypedoctor.worker.elsewhere import Elsewhere
from dtypedoctor.worker.on_import import after_import, keep_out_of_compiler
from dtypedoctor.worker.repeated import FirstRunFiles, RandomStates
from dtypedoctor.worker.tracebacks import hide_in_excepthook, hide_own_frames

if TYPE_CHECKING:
    from dtypedoctor.worker.script_watch import ScriptWatch
    from dtypedoctor.worker.spawned import Spawned


def serve(directory: Path) -> None:
    """Runs the script that ``DIRECTORY/request.json`` names and leaves the trace beside it.

    What the script raises, ``SystemExit`` and ``KeyboardInterrupt`` included, leaves this function, so that the interpreter
    ends as it would without the doctor.
    """
    request = from_json(read_request(directory))
    recording = Recording(request, directory)
    recording.begin()
    settings = request["scenario"]["steps"][0]["workload"]

    def ended(error: BaseException) -> None:
        if not isinstance(error, main_module.NotRunnableError):  # that one is refused
            recording.end(error)

    try:
        with noticing(ended):
            program = main_module.program(settings["path"], settings["module"], settings["code"])
    except main_module.NotRunnableError as error:
        recording.refuse(str(error))
        sys.exit(2)
    with noticing(recording.end):
        main_module.run(program, settings["args"])
    recording.end(None)


def serve_rank(directory: Path) -> None:
    """The same for one rank, whose directory lies in that of the run; it serves a scenario, too.

    Raises:
        RuntimeError: the process was not started by torchrun.
    """
    directory = _enter_rank(directory)
    steps = from_json(read_request(directory))["scenario"]["steps"]
    if steps[0]["workload"]["kind"] == "script":
        serve(directory)
        return
    status = import_module("dtypedoctor.worker.main").serve(directory)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the trace is complete: libraries' exit handlers can only hang or fail here


def _enter_rank(directory: Path) -> Path:
    """This rank's own directory in that of the run; its output goes from now on where the doctor reads it.

    Raises:
        RuntimeError: the process was not started by torchrun.
    """
    here = member()
    if here is None:
        raise RuntimeError("RANK and WORLD_SIZE are not set: this process was not started by torchrun")
    place = rank_directory(directory, here.rank)
    _write_to(place / STREAMS)
    return place


def _write_to(streams: Path) -> None:
    """Lets this process's output and error go where the doctor wants them; to torchrun's own where that is not possible."""
    try:
        paths = from_json(streams.read_bytes())
        for descriptor, path in enumerate(paths, start=1):
            end = os.open(path, os.O_WRONLY | os.O_NOCTTY)  # torchrun has made this process the first of a session
            os.dup2(end, descriptor)
            os.close(end)
    except OSError:
        return


class Recording:
    """The trace of a script, begun before it starts and ended after its last line."""

    def __init__(self, request: Mapping[str, Any], directory: Path) -> None:
        self._request = request
        self._writer = TraceWriter(directory)
        self._watch: ScriptWatch | None = None
        self._owner = getpid()
        repeats = request["repeats"]
        first = directory.parent / repeats if repeats else None
        self._randomness = RandomStates(directory, first)
        self._first_run_files = FirstRunFiles(first, directory, self._leave) if first is not None else None
        self._elsewhere = Elsewhere()
        self._began = perf_counter()
        self._directory = directory
        self._spawned: Spawned | None = None

    def begin(self) -> None:
        """Writes the header and waits for torch."""
        writer = self._writer
        writer.write(header(watched=self._request["watch"]))
        writer.write(Stage(n=writer.next_n(), index=0, name="script", workload="script"))
        os.register_at_fork(after_in_child=writer.disown)
        after_import("torch", self._torch_is_there)
        after_import("numpy.random", self._randomness.numpy_is_there)
        if member() is None:
            after_import("multiprocessing.spawn", self._follow_spawned)
        self._randomness.begin()
        self._elsewhere.begin()
        if self._first_run_files is not None:
            self._first_run_files.begin()

    def _leave(self, path: str) -> None:
        """Ends this process before it opens a file of the first run: what came after would not be what the first run did."""
        if getpid() == self._owner:
            self.refuse(
                f"the script reads or continues {path}, written during its first run: a second run would be another one"
            )
        os._exit(2)

    def _torch_is_there(self) -> None:
        with contained() as ours:  # a defect of ours must not end the script
            from dtypedoctor.worker.script_watch import ScriptWatch

            self._watch = ScriptWatch(self._writer, self._request)
            self._watch.start()
            for hook in (Elsewhere.heard, FirstRunFiles.heard):
                keep_out_of_compiler(hook)
        if ours.error is not None:
            self._writer.write(NotWatched(what=NOTHING_WATCHED, why=f"{type(ours.error).__name__}: {ours.error}"))

    def _follow_spawned(self) -> None:
        with contained() as ours:  # a defect of ours must not end the script
            from dtypedoctor.worker.spawned import Spawned

            self._spawned = Spawned(self._request, self._directory)
            self._spawned.begin()
        if ours.error is not None:
            self._writer.write(NotWatched(what="spawned processes", why=f"{type(ours.error).__name__}: {ours.error}"))

    def refuse(self, message: str) -> None:
        """There is nothing to run."""
        self._writer.write(Refused(message=message))
        self._finish("refused")

    def end(self, error: BaseException | None) -> None:
        """The script has come to its end, with ``error`` if it is one."""
        if getpid() != self._owner:
            return  # a child that the script has forked ends here too; the trace is its parent's
        if error is not None:
            hide_own_frames(error)
            hide_in_excepthook()
        raised = error if not isinstance(error, SystemExit) else None
        steps = 0
        with contained() as ours:  # a defect of ours, or a device that no longer answers
            if isinstance(error, SystemExit) and self._watch is not None:
                self._watch.process.note_exit(error)
            steps = self._conclude(raised)
        if ours.error is not None:
            self._writer.write(
                NotWatched(what="the end of the script", why=f"{type(ours.error).__name__}: {ours.error}")
            )
        self._finish("raised" if raised is not None else "completed", steps)

    def _conclude(self, error: BaseException | None) -> int:
        watch, writer = self._watch, self._writer
        self._elsewhere.end()
        followed = 0
        if self._spawned is not None:
            self._spawned.end()
            followed = self._spawned.count - self._spawned.not_followed
            if self._spawned.not_followed:
                writer.write(NotWatched(what=f"{self._spawned.not_followed} more spawned process(es)", why=NOT_HERE))
        for what, why in (*self._elsewhere.processes(followed), *self._elsewhere.threads()):
            writer.write(NotWatched(what=what, why=why))
        if watch is None:
            writer.write(NotWatched(what="tensors and modules", why=NO_TORCH))
            if error is not None:
                _without_torch(writer, error)
            return 0
        steps = watch.finish(error, self._elsewhere.libraries)
        writer.write(
            Resources(
                seconds=perf_counter() - self._began,
                peak_memory=watch.process.peak_memory(),
                device=watch.process.device,
                checksum=watch.checksum,
            )
        )
        return steps

    def _finish(self, outcome: str, steps: int = 0) -> None:
        self._writer.write(End(n=self._writer.next_n(), outcome=outcome, steps_completed=steps))
        self._writer.close()


def _without_torch(writer: TraceWriter, error: BaseException) -> None:
    """Records what ended a script that has never come to torch."""
    frames = traceback.extract_tb(error.__traceback__)
    writer.write(
        Raised(
            n=writer.next_n(),
            step=1,
            call=0,
            phase="forward",
            type=type(error).__name__,
            message=message_of(error),
            frames=[f"{f.filename}:{f.lineno} {f.name}" for f in frames],
            modules=[],
        )
    )
