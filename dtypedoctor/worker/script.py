"""A worker for a user's script: the same process does what ``python script.py`` would, with the watch around it.

Nothing heavy is imported here. The instruments come in when the script itself has imported torch, so environment variables
that it sets before that are heeded, and a script without torch pays nothing.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.trace.events import NOTHING_WATCHED, End, NotWatched, Raised, Refused, Resources, Stage
from dtypedoctor.trace.ranks import header
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker import main_module
from dtypedoctor.worker.elsewhere import Elsewhere
from dtypedoctor.worker.on_import import after_import
from dtypedoctor.worker.randomness import RandomStates
from dtypedoctor.worker.tracebacks import hide_in_excepthook, hide_own_frames

if TYPE_CHECKING:
    from dtypedoctor.worker.script_watch import ScriptWatch

REQUEST = "request.json"
"""The same name as in ``dtypedoctor.scenario.request``, whose pydantic models a script need not wait for."""


def serve(directory: Path) -> None:
    """Runs the script that ``DIRECTORY/request.json`` names and leaves the trace beside it.

    What the script raises, ``SystemExit`` and ``KeyboardInterrupt`` included, leaves this function, so that the interpreter
    ends as it would without the doctor.
    """
    request = json.loads((directory / REQUEST).read_bytes())
    recording = _Recording(request, directory)
    recording.begin()
    settings = request["scenario"]["steps"][0]["workload"]
    try:
        program = main_module.module(settings["module"]) if settings["module"] else main_module.script(settings["path"])
    except main_module.NotRunnableError as error:
        recording.refuse(str(error))
        sys.exit(2)
    except BaseException as error:
        recording.end(error)
        raise
    try:
        main_module.run(program, settings["args"])
    except BaseException as error:
        recording.end(error)
        raise
    recording.end(None)


class _Recording:
    """The trace of a script, begun before it starts and ended after its last line."""

    def __init__(self, request: Mapping[str, Any], directory: Path) -> None:
        self._request = request
        self._writer = TraceWriter(directory)
        self._watch: ScriptWatch | None = None
        self._owner = os.getpid()
        repeats = request["repeats"]
        self._randomness = RandomStates(directory, directory.parent / repeats if repeats else None)
        self._elsewhere = Elsewhere()
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Writes the header and waits for torch."""
        writer = self._writer
        writer.write(header(watched=self._request["watch"]))
        writer.write(Stage(n=writer.next_n(), index=0, name="script", workload="script"))
        os.register_at_fork(after_in_child=writer.disown)
        after_import("torch", self._torch_is_there)
        after_import("numpy.random", self._randomness.numpy_is_there)
        self._randomness.begin()
        self._elsewhere.begin()

    def _torch_is_there(self) -> None:
        try:
            from dtypedoctor.worker.script_watch import ScriptWatch

            self._watch = ScriptWatch(self._writer, self._request)
            self._watch.start()
        except Exception as error:  # noqa: BLE001  (a defect of ours must not end the script)
            self._writer.write(NotWatched(what=NOTHING_WATCHED, why=f"{type(error).__name__}: {error}"))

    def refuse(self, message: str) -> None:
        """There is nothing to run."""
        self._writer.write(Refused(message=message))
        self._finish("refused")

    def end(self, error: BaseException | None) -> None:
        """The script has come to its end, with ``error`` if it is one."""
        if os.getpid() != self._owner:
            return  # a child that the script has forked ends here too; the trace is its parent's
        if error is not None:
            hide_own_frames(error)
            hide_in_excepthook()
        raised = error if not isinstance(error, SystemExit) else None
        steps = 0
        try:
            steps = self._conclude(raised)
        except Exception as failure:  # noqa: BLE001  (a defect of ours, or a device that no longer answers)
            self._writer.write(NotWatched(what="the end of the script", why=f"{type(failure).__name__}: {failure}"))
        self._finish("raised" if raised is not None else "completed", steps)

    def _conclude(self, error: BaseException | None) -> int:
        watch, writer = self._watch, self._writer
        self._elsewhere.end()
        for what, why in (*self._elsewhere.processes(), *self._elsewhere.threads()):
            writer.write(NotWatched(what=what, why=why))
        if watch is None:
            writer.write(NotWatched(what="tensors and modules", why="the script has not imported torch"))
            if error is not None:
                _without_torch(writer, error)
            return 0
        steps = watch.finish(error, self._elsewhere.libraries)
        writer.write(
            Resources(
                seconds=time.perf_counter() - self._began,
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
            message=str(error)[:2000],
            frames=[f"{f.filename}:{f.lineno} {f.name}" for f in frames],
            modules=[],
        )
    )
