"""A worker for a user's script: the same process does what ``python script.py`` would, with the watch around it.

Nothing heavy is imported here. The instruments come in when the script itself has imported torch, so environment variables
that it sets before that are heeded, and a script without torch pays nothing.

A later run of a script is to be the same program as the first: it draws the same random numbers (:class:`RandomStates`), and it
is not run where it reads or continues a file that the first has written (:class:`FirstRunFiles`).
"""

import os
import random
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.interruptions import contained, noticing
from dtypedoctor.redaction.redact import read_request, write_request_file
from dtypedoctor.trace.events import NOT_HERE, NOTHING_WATCHED, NotWatched
from dtypedoctor.trace.ranks import STREAMS, member, member_of_torchrun, rank_directory
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.unpatched import from_json, time_ns, to_json, unseen_by_warnings
from dtypedoctor.worker import main_module
from dtypedoctor.worker.elsewhere import outliving_threads
from dtypedoctor.worker.on_import import after_import, keep_out_of_compiler, no_collection
from dtypedoctor.worker.recording import Recording, hide_in_excepthook

if TYPE_CHECKING:
    from dtypedoctor.worker.process_watch import ProcessWatch
    from dtypedoctor.worker.spawned import Spawned
    from dtypedoctor.worker.treated import EditedLibrary


@unseen_by_warnings
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
    worker = import_module("dtypedoctor.worker.main")
    worker.leave(worker.serve(directory))


def serve_launched(directory: Path, added: Sequence[str] = ()) -> None:
    """The same for a process that a launcher of the user's has started; it records beside the others in ``directory``.

    A process that the launcher starts a second time, after a failure, runs the script without being recorded. The script's arguments
    begin with ``added``.
    """
    here = member()
    place = rank_directory(directory, here.rank if here is not None else 0)
    request = from_json(read_request(directory))
    settings = request["scenario"]["steps"][0]["workload"]
    settings["args"] = [*added, *settings["args"]]
    if request["repeats"]:
        request["repeats"] = str(rank_directory(Path("..") / request["repeats"], int(place.name.rpartition("-")[2])))
    try:
        place.mkdir()
        write_request_file(place, to_json(request))
    except OSError:
        program = main_module.program(settings["path"], settings["module"], settings["code"])
        main_module.run(program, settings["args"])
        return
    serve(place)


def _enter_rank(directory: Path) -> Path:
    """This rank's own directory in that of the run; its output goes from now on where the doctor reads it.

    Raises:
        RuntimeError: the process was not started by torchrun.
    """
    here = member_of_torchrun()
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
        self._edited: list[EditedLibrary] = []

    def begin(self) -> None:
        """Listens to what the script does, and waits for it to import torch."""
        self._recording.follow_program("script")
        self._edited = edited_libraries(self._request, self._recording.writer)
        for one in self._edited:
            one.begin()
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
        for one in self._edited:
            one.record(self._recording.writer)
        followed = self._spawned.followed if self._spawned is not None else 0
        self._recording.end(error, self._unwatched(), followed)

    def _unwatched(self) -> Iterator[tuple[str, str]]:
        """What was not watched of the processes and threads that the script has started, and why."""
        if self._spawned is not None and self._spawned.not_followed:
            yield f"{self._spawned.not_followed} more spawned process(es)", NOT_HERE
        yield from outliving_threads()

    def _torch_is_there(self) -> None:
        with no_collection(), contained() as ours:  # a defect of ours must not end the script
            watch = _watch(self._recording.writer, self._request, {one.name for one in self._edited})
            self._recording.torch_is_there(watch)
            watch.start()
            if self._request["replay"]:
                watch.instruments.replay_failures(self._request["capsule_limit"])
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


def edited_libraries(request: Mapping[str, Any], writer: TraceWriter) -> list["EditedLibrary"]:
    """The corrections of a request that edit a library; each records itself when it is in place, or cannot be."""
    if not request["scenario"]["corrections"]:
        return []
    from dtypedoctor.plugins import Correction, registered
    from dtypedoctor.worker.treated import EditedLibrary

    wanted = [registered(Correction).get(spec["id"]) for spec in request["scenario"]["corrections"]]
    return [
        EditedLibrary(one.id, one.library, one.edits, counted=True, changed=lambda edited: edited.record(writer))
        for one in wanted
        if one is not None and one.edits
    ]


def _watch(writer: TraceWriter, request: Mapping[str, Any], edited: Collection[str]) -> "ProcessWatch":
    """The watch that a request asks for, without the corrections that are ``edited`` already; torch is there."""
    from dtypedoctor.instrument.budget import budget_of
    from dtypedoctor.worker.environment import StepDigest
    from dtypedoctor.worker.process_watch import ProcessWatch

    scenario = request["scenario"]
    conditions = corrections = None
    if scenario["conditions"]:
        from dtypedoctor.worker.interventions import Conditions

        conditions = Conditions(writer, scenario["conditions"])
    in_models = [spec for spec in scenario["corrections"] if spec["id"] not in edited]
    if in_models:
        from dtypedoctor.worker.interventions import OutsideCorrections

        corrections = OutsideCorrections(writer, in_models)
    return ProcessWatch(
        writer,
        watch=request["watch"],
        every=scenario["watch_every"],
        budget=budget_of(scenario["overhead_budget"]),
        conditions=conditions,
        corrections=corrections,
        digest=StepDigest() if request["witness"] else None,
    )


_CLOCK_STEP = 50_000_000
"""Nanoseconds by which a file's time may lie before the moment of writing; file systems use the coarse clock of the kernel."""
_CODE = (".py", ".pyc", ".so")
"""Suffixes of what is imported: somebody who edits their code while it runs changes nothing that the first run has written."""
_CACHES = ("/.cache/", "/.triton/", "/torchinductor_", "/__pycache__/")
"""Directories of what is computed again where it is missing: whether it is there changes nothing but time."""


class FirstRunFiles:
    """Keeps a later run of a script away from what the first one has written.

    A training that saves checkpoints and resumes from them, or appends to its log, is another program when it runs a second time: it
    begins where the first run ended, and what it writes is not what the user's run wrote. Python's audit events tell of a file
    before it is opened.

    Calls ``found`` with the path of a file from the first run that is about to be read or continued; that it is replaced is all right.

    Args:
        first: directory of the first run.
        own: directory of the run that is beginning.
        found: what to do; must not return if the file is not to be opened.
    """

    def __init__(self, first: Path, own: Path, found: Callable[[str], None]) -> None:
        self._found = found
        self._began = (first / "request.json").stat().st_mtime_ns
        self._ended = time_ns() - _CLOCK_STEP
        places = (str(first.resolve()), str(own.resolve()), sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev")
        self._ours = tuple(f"{place}/" for place in places)

    def begin(self) -> None:
        """Begins to listen; an audit hook cannot be taken back."""
        sys.addaudithook(self.heard)

    def heard(self, event: str, details: tuple[Any, ...]) -> None:
        """The audit hook."""
        if event != "open":
            return
        try:
            path, _, flags = details
            path = os.path.abspath(os.fsdecode(path))
            written = not flags & os.O_TRUNC and self._was_written_by_the_first(path)
        except (OSError, TypeError, ValueError):
            return  # a descriptor, no such file, no working directory, another event of this name
        if written:
            self._found(path)

    def _was_written_by_the_first(self, path: str) -> bool:
        if path.startswith(self._ours) or path.endswith(_CODE) or any(cache in path for cache in _CACHES):
            return False
        status = os.stat(path)
        return stat.S_ISREG(status.st_mode) and self._began <= status.st_mtime_ns < self._ended


STATES = "random_states.json"


class RandomStates:
    """The states of Python's and numpy's generators at the beginning of a run, kept beside its trace and set in the later ones.

    Both begin with entropy of the system; torch's begins with the same seed in every process anyway.

    Args:
        directory: where they are kept.
        repeats: directory of the run whose states this one begins with; None for a run that begins with its own.
    """

    def __init__(self, directory: Path, repeats: Path | None) -> None:
        self._kept = directory / STATES
        self._states: dict[str, Any] = {}
        if repeats is not None and (repeats / STATES).exists():
            self._states = from_json((repeats / STATES).read_bytes())

    def begin(self) -> None:
        """The script is about to start."""
        if "python" in self._states:
            version, internal, gauss = self._states["python"]
            random.setstate((version, tuple(internal), gauss))
        else:
            self._keep("python", random.getstate())

    def numpy_is_there(self) -> None:
        """numpy's random module has been imported."""
        numpy_random: Any = sys.modules["numpy.random"]
        if "numpy" in self._states:
            numpy_random.set_state(tuple(self._states["numpy"]))
        else:
            name, keys, *rest = numpy_random.get_state()
            self._keep("numpy", (name, keys.tolist(), *rest))

    def _keep(self, name: str, state: Any) -> None:
        self._states[name] = state
        try:
            self._kept.write_text(to_json(self._states), encoding="ascii")
        except OSError:  # a full disk: the script goes on, and a second look at it may draw other numbers
            return
