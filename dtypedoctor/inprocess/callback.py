"""A callback for transformers' Trainer and every trainer that is made from it."""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dtypedoctor.inprocess.context import announce
from dtypedoctor.inprocess.recording import Recording
from dtypedoctor.report.model import Report

__all__ = ["DtypeDoctorCallback"]

NO_END = "training did not come to its end, and the program went on"


class DtypeDoctorCallback(TrainerCallback):
    """Watches ``trainer.train()`` and leaves a run directory with ``report.json`` and ``report.md``.

    Works with gradient accumulation, gradient checkpointing, generation and evaluation. A trainer does not tell its
    callbacks of an exception: such a training is written up by :meth:`finish`, at the latest when the process ends. Of
    several processes only the first one is watched.

    Args:
        out: run directory to create; ``runs/NAME-TIME`` if left out. Later trainings go to ``OUT-2``, ``OUT-3``, …

    Attributes:
        report: what was said at the end of the last training; None before.
    """

    def __init__(self, out: str | os.PathLike[str] | None = None) -> None:
        self._out = Path(out) if out is not None else None
        self._trainings = 0
        self._recording: Recording | None = None
        self.report: Report | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to watch."""
        self.finish()
        if not state.is_world_process_zero:
            return
        self._trainings += 1
        if self._trainings == 1:
            atexit.register(self._at_exit)
        out = self._out
        if out is not None and self._trainings > 1:
            out = out.with_name(f"{out.name}-{self._trainings}")
        self._recording = Recording(out)
        self._recording.begin(kwargs.get("model"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops watching and writes the report."""
        self._end(None, "")

    def finish(self, error: BaseException | None = None) -> None:
        """Writes the report of a training that has not come to its end; does nothing after one that has.

        Args:
            error: what ended it, where that is known.
        """
        self._end(error, NO_END if error is None else "")

    def _at_exit(self) -> None:
        self.finish(getattr(sys, "last_value", None))  # what Python has shown as the program's uncaught exception

    def _end(self, error: BaseException | None, note: str) -> None:
        recording, self._recording = self._recording, None
        if recording is not None and recording.active:
            self.report = recording.end(error, note)
            announce(self.report, recording.directory)
