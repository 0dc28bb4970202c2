"""A callback for Lightning's Trainer."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "lightning" in sys.modules or "pytorch_lightning" not in sys.modules:
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise ImportError(
            "LightningCallback needs lightning, which is not installed (`pip install lightning`). For a training loop of your own "
            "use `with dtypedoctor.watch(model):`."
        ) from error
else:  # the older name of the same package, whose Trainer takes no other callbacks than its own
    from pytorch_lightning import Callback

from dtypedoctor.inprocess import Watched, WatchReport, numbered, watched_for
from dtypedoctor.interruptions import say


class LightningCallback(Callback):
    """Watches ``trainer.fit()`` and leaves a run directory with ``report.json`` and ``report.md``; the report says what ended the fit if it raised.

    Of several processes only the first one is watched. A fit that runs while the process is being watched already is part of that
    report and gets none of its own.

    Args:
        out: run directory to create; ``runs/NAME-TIME`` if left out. Later fits go to ``OUT-2``, ``OUT-3``, …
        every: every module is measured in each ``every``-th training step, see :class:`dtypedoctor.watch`.
        overhead_budget: share of the time that measuring may take, see :class:`dtypedoctor.watch`.
        replay: make what fails again with each operator on record, see :class:`dtypedoctor.watch`; without it the report seldom knows the edit.
        log: give the trainer's loggers per-module statistics every ``log_every_n_steps`` steps, and the findings at the end.

    Attributes:
        report: what was found in the last fit; None before.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        overhead_budget: float | str | None = None,
        replay: bool = True,
        log: bool = False,
    ) -> None:
        self._out = Path(out) if out is not None else None
        self._options: dict[str, Any] = {"every": every, "overhead_budget": overhead_budget, "replay": replay}
        self._log = log
        self._fits = 0
        self._watched: Watched | None = None
        self.report: WatchReport | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to watch.

        Raises:
            dtypedoctor.errors.UsageError: the run directory exists, or cannot be created.
        """
        if not trainer.is_global_zero:
            return
        if (other := watched_for()) is not None:
            say(f"dtypedoctor: this training is already recorded in {other}")
            return
        self._fits += 1
        out = self._out if self._fits == 1 else numbered(self._out, self._fits)
        self._watched = Watched(out, statistics=self._log, **self._options)
        self._watched.begin(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Gives the loggers the statistics since the last time."""
        if self._log and self._watched is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            _to_loggers(trainer, self._watched.scalars())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Stops watching, writes the report and gives the loggers the findings."""
        self._end(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Writes the report of a fit that has raised."""
        self._end(trainer, exception)

    def _end(self, trainer: Any, error: BaseException | None) -> None:
        watched, self._watched = self._watched, None
        if watched is None or not watched.active:
            return
        watched.end(error)
        self.report = watched.report
        if self._log and self.report is not None:
            _to_loggers(trainer, self.report.scalars())


def _to_loggers(trainer: Any, values: dict[str, float]) -> None:
    for logger in trainer.loggers if values else ():
        logger.log_metrics(values, step=trainer.global_step)
