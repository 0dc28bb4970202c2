"""A callback for transformers' Trainer and every trainer that is made from it."""

import atexit
import sys
from typing import Any

from dtypedoctor.errors import INSTALL_HF

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"DtypeDoctorCallback needs transformers, which is not installed. {INSTALL_HF}. For a training loop of your own "
        "use `with dtypedoctor.watch(model):`."
    ) from error

from dtypedoctor.inprocess import Trainings

NO_END = "training did not complete, and the program continued"


class DtypeDoctorCallback(Trainings, TrainerCallback):
    """Watches ``trainer.train()`` and leaves a run directory with ``report.json`` and ``report.md``.

    Works with gradient accumulation, gradient checkpointing, generation and evaluation. A trainer does not tell its
    callbacks of an exception: such a training is written up by :meth:`finish`, at the latest when the process ends. Of
    several processes only the first one is watched.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to watch.

        Raises:
            dtypedoctor.errors.UsageError: the run directory exists, or cannot be created.
        """
        self.finish()
        if not state.is_world_process_zero:
            return
        self._begin(kwargs.get("model"))
        if self._trainings == 1:
            atexit.register(self._at_exit)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops watching and writes the report."""
        self._end(None)

    def finish(self, error: BaseException | None = None) -> None:
        """Writes the report of a training that has not come to its end; does nothing after one that has.

        Args:
            error: what ended it, where that is known.
        """
        self._end(error, NO_END if error is None else "")

    def _at_exit(self) -> None:
        self.finish(getattr(sys, "last_value", None))  # what Python has shown as the program's uncaught exception
