"""``with dtypedoctor.watch(model): …``"""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from dtypedoctor.inprocess.recording import Recording
from dtypedoctor.report.model import Report
from dtypedoctor.report.text import one_line
from dtypedoctor.unpatched import say

__all__ = ["watch"]


class watch:  # noqa: N801  (used as a function is: `with dtypedoctor.watch(model)`)
    """Watches everything that runs inside of the ``with`` block and leaves a run directory with ``report.json``.

    Every module that is called is watched, also others than ``model``. An exception leaves the block as it was raised.

    Args:
        model: named first, so that dotted names in the report begin at it; may be left out.
        out: run directory to create; ``runs/NAME-TIME`` if left out.
        every: every module is measured in each ``every``-th training step, the first included; in the others, and always
            with 0, only the residual stream and the loss.

    Attributes:
        directory: the run directory, which is created on entering.
        report: the finished report; None inside of the block.

    Raises:
        dtypedoctor.errors.UsageError: on entering, where ``model`` is no module, the directory exists, or the process is
            being watched already.
    """

    def __init__(
        self, model: nn.Module | None = None, *, out: str | os.PathLike[str] | None = None, every: int = 1
    ) -> None:
        self._model = model
        self._recording = Recording(Path(out) if out is not None else None, every=every)

    @property
    def directory(self) -> Path:
        """The run directory, which is created on entering."""
        return self._recording.directory

    @property
    def report(self) -> Report | None:
        """The finished report; None inside of the block."""
        return self._recording.report

    def __enter__(self) -> Self:
        self._recording.begin(self._model)
        self._model = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        announce(self._recording.end(error), self.directory)


def announce(report: Report | None, directory: Path) -> None:
    """Says on stderr, in two lines, what was found and where the report is."""
    if report is not None:
        say(f"dtypedoctor: {one_line(report.headline, 600)}\ndtypedoctor: report in {directory}")
