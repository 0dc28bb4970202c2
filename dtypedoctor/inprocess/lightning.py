"""A callback for Lightning's Trainer."""

import sys
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

from dtypedoctor.inprocess import Trainings


class LightningCallback(Trainings, Callback):
    """Watches ``trainer.fit()`` and leaves a run directory with ``report.json`` and ``report.md``; the report says what ended the fit if it raised.

    Of several processes only the first one is watched.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to watch.

        Raises:
            dtypedoctor.errors.UsageError: the run directory exists, or cannot be created.
        """
        if trainer.is_global_zero:
            self._begin(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Stops watching and writes the report."""
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Writes the report of a fit that has raised."""
        self._end(exception)
