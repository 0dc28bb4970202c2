"""A callback for transformers' Trainer and every trainer that is made from it."""

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.errors import INSTALL_HF

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"DtypeDoctorCallback needs transformers, which is not installed. {INSTALL_HF}. For a training loop of your own "
        "use `with dtypedoctor.watch(model):`."
    ) from error

from dtypedoctor.inprocess import Watched, WatchReport, numbered, watched_for
from dtypedoctor.interruptions import say

if TYPE_CHECKING:
    from transformers import Trainer

NO_END = "training did not complete, and the program continued"


class DtypeDoctorCallback(TrainerCallback):
    """Watches ``trainer.train()`` and leaves a run directory with ``report.json`` and ``report.md``.

    Works with gradient accumulation, gradient checkpointing, generation and evaluation. A trainer does not tell its
    callbacks of an exception: such a training is written up by :meth:`finish`, at the latest when the process ends. Of
    several processes only the first one is watched. A training that runs while the process is being watched already is
    part of that report and gets none of its own.

    Args:
        out: run directory to create; ``runs/NAME-TIME`` if left out. Later trainings go to ``OUT-2``, ``OUT-3``, …
        every: every module is measured in each ``every``-th training step, the first included; in the others, and always
            with 0, only the residual stream and the loss.
        overhead_budget: share of the time that measuring may take, see :class:`dtypedoctor.watch`.
        replay: make what fails again with each operator on record, see :class:`dtypedoctor.watch`; without it the report seldom knows the edit.
        log_to: the trainer, whose experiment trackers (``report_to``) get per-module statistics whenever it logs, and the findings at the end::

            trainer.add_callback(DtypeDoctorCallback(log_to=trainer))

    Attributes:
        report: what was said at the end of the last training; None before.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        overhead_budget: float | str | None = None,
        replay: bool = True,
        log_to: "Trainer | None" = None,
    ) -> None:
        self._out = Path(out) if out is not None else None
        self._every = every
        self._budget = overhead_budget
        self._replay = replay
        self._trainer = log_to
        self._trainings = 0
        self._watched: Watched | None = None
        self.report: WatchReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to watch.

        Raises:
            dtypedoctor.errors.UsageError: the run directory exists, or cannot be created.
        """
        self.finish()
        if not state.is_world_process_zero:
            return
        if (other := watched_for()) is not None:
            say(f"dtypedoctor: this training is already recorded in {other}")
            return
        self._trainings += 1
        if self._trainings == 1:
            atexit.register(self._at_exit)
        out = self._out if self._trainings == 1 else numbered(self._out, self._trainings)
        self._watched = Watched(
            out,
            every=self._every,
            overhead_budget=self._budget,
            replay=self._replay,
            statistics=self._trainer is not None,
        )
        self._watched.begin(kwargs.get("model"))
        # At the end of a training trackers close their run: the findings have to be there before
        callbacks = self._trainer.callback_handler.callbacks if self._trainer is not None else []
        if self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gives the trackers the statistics since the last time."""
        if self._watched is not None and self._watched.active and self._trainer is not None:
            self._track(self._watched.scalars(), args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops watching, writes the report and gives the trackers the findings."""
        if self._watched is not None and self._watched.active:
            self._end(None, "")
            if self.report is not None:
                self._track(self.report.scalars(), args, state, control)

    def _track(self, values: dict[str, float], args: Any, state: Any, control: Any) -> None:
        """Logs to the trackers alone: the trainer's own history and what it prints stay as they are."""
        if self._trainer is None or not values:
            return
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        handler = self._trainer.callback_handler
        trackers: Any = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in handler.callbacks:
            if isinstance(callback, trackers):
                callback.on_log(args, state, control, logs=dict(values), model=handler.model)

    def finish(self, error: BaseException | None = None) -> None:
        """Writes the report of a training that has not come to its end; does nothing after one that has.

        Args:
            error: what ended it, where that is known.
        """
        self._end(error, NO_END if error is None else "")

    def _at_exit(self) -> None:
        self.finish(getattr(sys, "last_value", None))  # what Python has shown as the program's uncaught exception

    def _end(self, error: BaseException | None, note: str) -> None:
        watched, self._watched = self._watched, None
        if watched is not None and watched.active:
            watched.end(error, note)
            self.report = watched.report
