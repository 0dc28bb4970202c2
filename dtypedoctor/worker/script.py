"""A worker for a user's script: the same process does what ``python script.py`` would, with the watch around it.

Nothing heavy is imported here. The instruments come in when the script itself has imported torch, so environment variables
that it sets before that are heeded, and a script without torch pays nothing.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.interruptions import contained, noticing
from dtypedoctor.redaction.redact import read_request
from dtypedoctor.trace.events import NOT_HERE, NOTHING_WATCHED, NotWatched
from dtypedoctor.trace.ranks import STREAMS, member, rank_directory
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.unpatched import from_json
from dtypedoctor.worker import main_module
from dtypedoctor.worker.elsewhere import outliving_threads
from dtypedoctor.worker.on_import import after_import, keep_out_of_compiler
from dtypedoctor.worker.recording import Recording
from dtypedoctor.worker.repeated import FirstRunFiles, RandomStates
from dtypedoctor.worker.tracebacks import hide_in_excepthook

if TYPE_CHECKING:
    from dtypedoctor.worker.process_watch import ProcessWatch
    from dtypedoctor.worker.spawned import Spawned


def serve(directory: Path) -> None:
    """Runs the script that ``DIRECTORY/request.json`` names and leaves the trace beside it.

    What the script raises, ``SystemExit`` and ``KeyboardInterrupt`` included, leaves this function, so that the interpreter
    ends as it would without the doctor.
    """
    request = from_json(read_request(directory))
    recording = ScriptRecording(request, directory)
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


class ScriptRecording:
    """The recording of a user's script, or of a process that it has spawned: begun before that starts, and waiting for torch.

    Args:
        request: the decoded request file.
        directory: where the trace lies.
    """

    def __init__(self, request: Mapping[str, Any], directory: Path) -> None:
        self._request = request
        self._directory = directory
        self._recording = Recording(directory, watched=request["watch"])
        repeats = request["repeats"]
        first = directory.parent / repeats if repeats else None
        self._randomness = RandomStates(directory, first)
        self._first_run_files = FirstRunFiles(first, directory, self._leave) if first is not None else None
        self._spawned: Spawned | None = None

    def begin(self) -> None:
        """Listens to what the script does, and waits for it to import torch."""
        self._recording.follow_program("script")
        after_import("torch", self._torch_is_there)
        after_import("numpy.random", self._randomness.numpy_is_there)
        if member() is None:
            after_import("multiprocessing.spawn", self._follow_spawned)
        self._randomness.begin()
        if self._first_run_files is not None:
            self._first_run_files.begin()

    def refuse(self, message: str) -> None:
        """There is nothing to run."""
        self._recording.refuse(message)

    def end(self, error: BaseException | None) -> None:
        """The script has come to its end, with ``error`` if it is one; in a child that it has forked that means nothing."""
        if not self._recording.active:
            return
        if error is not None:
            hide_in_excepthook()
        if self._spawned is not None:
            self._spawned.end()
        followed = self._spawned.followed if self._spawned is not None else 0
        self._recording.end(error, self._unwatched(), followed)

    def _unwatched(self) -> Iterator[tuple[str, str]]:
        """What was not watched of the processes and threads that the script has started, and why."""
        if self._spawned is not None and self._spawned.not_followed:
            yield f"{self._spawned.not_followed} more spawned process(es)", NOT_HERE
        yield from outliving_threads()

    def _torch_is_there(self) -> None:
        with contained() as ours:  # a defect of ours must not end the script
            watch = _watch(self._recording.writer, self._request)
            self._recording.torch_is_there(watch)
            watch.start()
            if self._request["standby"] and member() is None:
                keep_standbys(self._directory, self._recording, watch)
            keep_out_of_compiler(FirstRunFiles.heard)
        if ours.error is not None:
            self._failed(NOTHING_WATCHED, ours.error)

    def _follow_spawned(self) -> None:
        with contained() as ours:
            from dtypedoctor.worker.spawned import Spawned

            self._spawned = Spawned(self._request, self._directory)
            self._spawned.begin()
        if ours.error is not None:
            self._failed("spawned processes", ours.error)

    def _failed(self, what: str, error: Exception) -> None:
        self._recording.writer.write(NotWatched(what=what, why=f"{type(error).__name__}: {error}"))

    def _leave(self, path: str) -> None:
        """Ends this process before it opens a file of the first run: what came after would not be what the first run did."""
        if self._recording.active:
            self.refuse(
                f"the script reads or continues {path}, written during its first run: a second run would be another one"
            )
        os._exit(2)


def keep_standbys(directory: Path, recording: Recording, watch: "ProcessWatch") -> None:
    """Has the process leave forks from which parts of it can be replayed."""
    from dtypedoctor.worker.standbys import Standbys

    Standbys(directory, recording, watch).begin()


def _watch(writer: TraceWriter, request: Mapping[str, Any]) -> "ProcessWatch":
    """The watch that a request asks for; torch is there."""
    from dtypedoctor.instrument.optrace import OpWindow
    from dtypedoctor.worker.conditions import Conditions
    from dtypedoctor.worker.environment import StepDigest
    from dtypedoctor.worker.process_watch import ProcessWatch

    scenario = request["scenario"]
    corrections = None
    if scenario["corrections"]:
        from dtypedoctor.worker.corrections import OutsideCorrections

        corrections = OutsideCorrections(writer, scenario["corrections"])
    windows = [OpWindow(**window) for window in request["windows"]]
    return ProcessWatch(
        writer,
        watch=request["watch"],
        windows=windows,
        every=1 if windows else scenario["watch_every"],
        conditions=Conditions(writer, scenario["conditions"]),
        corrections=corrections,
        digest=StepDigest() if request["witness"] else None,
    )
