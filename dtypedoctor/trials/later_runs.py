"""Makes the runs that follow the first one of a treatment, as long as anybody wants them."""

import os
import signal
from collections.abc import Callable

from dtypedoctor.errors import DoctorError
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.request import Request

__all__ = ["LaterRuns", "RunRequest", "was_asked_to_end"]

RunRequest = Callable[[str, Request], Run]
"""Runs a request under a label that is unique within the treatment, e.g. ``before`` or ``remedy-bfloat16``."""

ENDED = "a run before it was stopped from outside"


class LaterRuns:
    """Makes the runs that follow the first. That one cannot be made is never raised: the first is over, and is reported."""

    def __init__(self, run: RunRequest, first: Run) -> None:
        self._run = run
        self._ended = was_asked_to_end(first)
        self.refusals: list[str] = []
        self.last: Run | None = None

    def __call__(self, label: str, request: Request) -> Run | None:
        """The run; where it cannot be made None, and the reason is noted."""
        made = self.attempt(label, request)
        if isinstance(made, Run):
            return made
        self.refusals.append(f"the run {label!r} could not be made: {made}")
        return None

    def attempt(self, label: str, request: Request) -> Run | str:
        """The run, or why it cannot be made, or not be recorded to its end: that a failure is missing in it says nothing."""
        if self._ended:
            return ENDED
        try:
            made = self.last = self._run(label, request)
        except DoctorError as error:
            return error.message
        except OSError as error:
            return error.strerror or str(error)
        self._ended = was_asked_to_end(made)
        return made if made.trace.stopped is None else os.strerror(made.trace.stopped.errno)


def was_asked_to_end(run: Run) -> bool:
    """Whether somebody wants it all to end, so that nothing more is to be run."""
    return bool(run.exit.asked_to_end) or -run.exit.code in (signal.SIGINT, signal.SIGTERM)
