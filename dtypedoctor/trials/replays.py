"""Replays a part of a script's run from a standby that the run has left, where else the whole script would be run again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtypedoctor.analysis import analysis_of
from dtypedoctor.errors import UsageError
from dtypedoctor.replay.wake import Waiting, go_on, waiting_in
from dtypedoctor.runner.run import Run, WorkerExit, collect
from dtypedoctor.scenario.request import Request, Window
from dtypedoctor.trace.events import Sample
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.caught import with_caught
from dtypedoctor.unpatched import monotonic

__all__ = ["LONGEST", "Certificate", "Replays"]

LONGEST = 600.0
SHORTEST = 30.0
"""Bounds, in seconds, of the time that a replay may take; between them it is :data:`SLOWER` times that of the run itself."""
SLOWER = 4.0
ROUNDING = 0.01
"""Relative difference of two magnitudes up to which the order in which sums are added may explain it, also in half precision."""

NO_STANDBY = "no process stood by before it"
NOT_ENDED = "the replay did not end in time"


class Replays:
    """Makes the replays of one run; called like :class:`dtypedoctor.trials.later_runs.LaterRuns`.

    Args:
        run: what is replayed.
        longest: seconds that a replay may take.

    Attributes:
        last: the last replay that was made.
        why_not: why the last one asked for could not be made.
    """

    def __init__(self, run: Run, longest: float = LONGEST) -> None:
        self._longest = longest
        self._run = run
        self.last: Run | None = None
        self.why_not = ""
        self._from = 0

    def __call__(self, label: str, request: Request) -> Run | None:
        """The replay in a directory named ``label``, with the op trace on in the windows of ``request``; None where there is none."""
        waiting = _before(waiting_in(self._run.directory), request.windows)
        if waiting is None:
            self.why_not = NO_STANDBY
            return None
        try:
            self.last = self._made(waiting, self._run.directory.parent / label, request.windows)
        except OSError as error:
            self.why_not = f"the process that stood by does not answer ({error.strerror or error})"
            return None
        except UsageError as error:
            self.why_not = error.message
            return None
        self.why_not = NOT_ENDED if self.last.exit.timed_out else ""
        return self.last

    def _made(self, waiting: Waiting, directory: Path, windows: Sequence[Window]) -> Run:
        directory.mkdir()
        self._from = waiting.call
        began = monotonic()
        seconds = min(self._longest, max(SHORTEST, SLOWER * self._run.exit.seconds))
        raised = analysis_of(self._run.trace).uncaught
        told = {
            "windows": [window.model_dump() for window in windows],
            "seconds": int(seconds),
            "raised": [raised.type, raised.call] if raised is not None else [],
        }
        ended = go_on(waiting, directory, told, seconds)
        exit_ = WorkerExit(code=0, timed_out=not ended, seconds=monotonic() - began)
        by_call = self._run.trace.by_call  # a replay that is over early may have come to no optimizer step
        return with_caught(replace(collect(directory, exit_, foreign=by_call), foreign=True))

    def certificate(self, replay: Run) -> "Certificate":
        """Compares what was measured in ``replay``, made last, with what was measured in the run itself."""
        return _compare(self._run.trace, replay.trace, self._from)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Whether a replay did what the run has done.

    Attributes:
        words: what was compared, as a sentence.
        doubt: how the replay differs, as a clause; empty where it does not.
    """

    words: str
    doubt: str = ""


def _compare(first: Trace, again: Trace, call: int) -> Certificate:
    one, other = _measured(first, call), _measured(again, call)
    both = [(key, value, other[key]) for key, value in one.items() if key in other]
    unequal = [(key, value, now) for key, value, now in both if _values(value) != _values(now)]
    begun = f"Op trace: replayed from before call {call} of this run"
    for (site, *_), value, now in unequal:
        if not _is_close(value, now):
            name, when = site[2] or site[0], first.moment(value.step)
            said = f"the replay differed: {name} was {_words(value)} in {when}, in the replay {_words(now)}"
            return Certificate(words=f"{begun}; {said}.", doubt=said)
    if unequal:
        return Certificate(
            words=f"{begun} on one thread; {len(unequal):,} of {len(both):,} values measured in both differ, by rounding."
        )
    same = f"; all {len(both):,} values measured in both are equal" if both else ""
    return Certificate(words=f"{begun}{same}.")


_Key = tuple[tuple[Any, ...], int, int, int]
"""Where something was measured, in which step and call, and which time there."""


def _measured(trace: Trace, call: int) -> dict[_Key, Sample]:
    times: Counter[tuple[Any, ...]] = Counter()
    found: dict[_Key, Sample] = {}
    for sample in trace.samples:
        if sample.call >= call:
            site = trace.sites[sample.site]
            where = (site.kind, site.root, site.fqn, site.phase, site.index, site.dtype, tuple(site.shape))
            times[where, sample.step, sample.call] += 1
            found[where, sample.step, sample.call, times[where, sample.step, sample.call]] = sample
    return found


def _values(sample: Sample) -> tuple[float, int, int]:
    return sample.absmax, sample.num_nan, sample.num_inf


def _is_close(one: Sample, other: Sample) -> bool:
    """Whether two samples differ no more than sums do that are added up in another order."""
    counts = (one.num_nan, one.num_inf) == (other.num_nan, other.num_inf)
    return counts and abs(one.absmax - other.absmax) <= ROUNDING * max(one.absmax, other.absmax)


def _words(sample: Sample) -> str:
    bad = f" with {sample.num_nan + sample.num_inf:,} inf or NaN" if not sample.finite else ""
    return f"{sample.absmax:.6g}{bad}"


def _before(standbys: Sequence[Waiting], windows: Sequence[Window]) -> Waiting | None:
    """The latest of ``standbys`` from which all of ``windows`` are still to come."""
    return next((one for one in standbys if all(_is_to_come(window, one) for window in windows)), None)


def _is_to_come(window: Window, standby: Waiting) -> bool:
    if window.step:
        return standby.step < window.step or (standby.step == window.step == 1)
    return standby.call < window.call or (standby.call == window.call and (not window.early or window.call == 1))
