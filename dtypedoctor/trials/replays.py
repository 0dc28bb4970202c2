"""Replays a part of a script's run from a standby that the run has left, where else the whole script would be run again."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dtypedoctor.analysis import analysis_of, with_caught
from dtypedoctor.diagnosis.window import shows_failure
from dtypedoctor.errors import UsageError
from dtypedoctor.replay.wake import Waiting, before, go_on, waiting_in
from dtypedoctor.runner.run import Run, WorkerExit, collect
from dtypedoctor.scenario.model import Request, Window
from dtypedoctor.trace.events import Metric, Observed, Sample
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import (
    CompileCounts,
    FailingBits,
    GraphBreak,
    Recompiled,
    RecompileLimit,
    ReplayNote,
)
from dtypedoctor.unpatched import monotonic
from dtypedoctor.values import dataclass

__all__ = ["LONGEST", "Certificate", "Replays", "replay_of"]

LONGEST = 600.0
SHORTEST = 30.0
"""Bounds, in seconds, of the time that a replay may take; between them it is :data:`SLOWER` times that of the run itself."""
SLOWER = 4.0
ROUNDING = 0.01
"""Relative difference of two magnitudes up to which the order in which sums are added may explain it, also in half precision."""

_OF_COMPILER = (CompileCounts, GraphBreak, Recompiled, RecompileLimit)
NO_STANDBY = "no fork of the process was made before the call that failed"
NOT_ENDED = "the replay did not end in time"


class Replays:
    """Makes the replays of one run; called like :class:`dtypedoctor.trials.runs.LaterRuns`.

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
        waiting = before(waiting_in(self._run.directory), request.windows)
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
        self.why_not = NOT_ENDED if self.last.exit.timed_out else _cut_short(self.last.trace)
        if self.why_not and shows_failure(self.last.trace):  # what it was made for has happened by then
            self.why_not = ""
            self.last = replace(self.last, exit=replace(self.last.exit, timed_out=False))
        return self.last

    def _made(self, waiting: Waiting, directory: Path, windows: Sequence[Window]) -> Run:
        _make(directory)
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
        return replay_of(self._run, collect(directory, exit_, foreign=by_call))

    def certificate(self, replay: Run) -> "Certificate":
        """Compares what was measured in ``replay``, made last, with what was measured in the run itself."""
        return _compare(self._run.trace, replay.trace, self._from)


def replay_of(run: Run, made: Run) -> Run:
    """What a process that stood by for ``run`` has made, as a run that can be judged."""
    trace = _with_compilation(made.trace, run.trace)
    status = replace(made.exit, code=run.exit.code)  # whether a program has failed that caught its exceptions
    judged = with_caught(replace(made, trace=trace, exit=status, foreign=True))
    return replace(judged, exit=made.exit)


def _with_compilation(replay: Trace, run: Trace) -> Trace:
    """A replay starts no compiler and does not end with the program: what was compiled in it is what was compiled in the run."""
    kept = [record for record in replay.records if not _is_of_compiler(record)]
    return replace(replay, records=(*kept, *filter(_is_of_compiler, run.records)))


def _is_of_compiler(record: Any) -> bool:
    return isinstance(record, Observed) and isinstance(record.what, _OF_COMPILER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Whether a replay did what the run has done.

    Attributes:
        words: what was compared, as a sentence.
        differs: how the replay differs in bits though it does the same, as a clause; nothing that it shows is proven then.
        doubt: how the replay does something else, as a clause; it shows nothing then.
    """

    words: str
    differs: str = ""
    doubt: str = ""


def _compare(first: Trace, again: Trace, call: int) -> Certificate:
    begun = f"Op trace: replayed from before call {call} of this run"
    values = _both_values(first, again, call)
    doubt = next(_other_values(values, first), "")
    if doubt:
        return Certificate(words=f"{begun}; {doubt}.", doubt=doubt)
    losses, bits = _both_losses(first, again), _both_bits(first, again)
    differs = "; ".join((*_unequal_values(values), *_unequal_losses(losses), *_unequal_bits(bits)))
    if not (values or losses or bits):
        differs = "nothing that was measured in the run was measured in it"
    if differs:
        differs = f"the replay differed: {differs}{_reasons(again)}"
        return Certificate(words=f"{begun}; {differs}, so no finding is proven by it.", differs=differs)
    exact = f"; bitwise identical where it fails ({_count(bits, 'tensor')}, random state)" if bits else ""
    same = f"; all values measured in both ({len(values):,}) are equal" if values else ""
    return Certificate(words=f"{begun}{exact}{same}.")


def _make(directory: Path) -> None:
    try:
        directory.mkdir()
    except OSError as error:
        raise UsageError(
            f"the directory {directory.name!r} cannot be made in the run directory ({error.strerror})"
        ) from error


def _cut_short(again: Trace) -> str:
    """Why a replay, or its recording, was over before the program was; empty where it was not."""
    if not again.records:
        return "nothing of the replay could be recorded"
    if again.stopped is not None:
        return f"the replay cannot be recorded ({os.strerror(again.stopped.errno)})"
    return next(
        (f"the replay ended early: {note.what.why}" for note in again.observed(ReplayNote) if note.what.ended), ""
    )


def _reasons(again: Trace) -> str:
    reasons = [note.what.why for note in again.observed(ReplayNote) if not note.what.ended]
    return f" ({', '.join(reasons)})" if reasons else ""


class _Value(NamedTuple):
    """What was measured in a run and, at the same place and time, in its replay."""

    name: str
    one: Sample
    now: Sample


def _both_values(first: Trace, again: Trace, call: int) -> list[_Value]:
    one, other = _measured(first, call), _measured(again, call)
    return [_Value(key[0][2] or key[0][0], sample, other[key]) for key, sample in one.items() if key in other]


def _other_values(values: Sequence[_Value], first: Trace) -> Iterator[str]:
    """Values by which the replay has done something else than the run, as clauses."""
    for name, one, now in values:
        if not _is_close(one, now):
            yield f"the replay differed: {name} was {_words(one)} in {first.moment(one.step)}, in the replay {_words(now)}"


def _unequal_values(values: Sequence[_Value]) -> Iterator[str]:
    unequal = [value for value in values if value.one.absmax != value.now.absmax]
    if unequal:
        most = max(map(_relative_difference, unequal))
        yield f"{len(unequal):,} of {len(values):,} measured values, by at most {most:.1g} of their size"


def _unequal_losses(losses: Sequence[tuple[float, float]]) -> Iterator[str]:
    unequal = [pair for pair in losses if pair[0] != pair[1]]
    if unequal:
        yield f"{len(unequal):,} of {len(losses):,} losses"


def _unequal_bits(bits: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    unequal = [name for name, one, now in bits if one != now]
    if unequal:
        more = f" and {_count(unequal[1:], 'more tensor')}" if unequal[1:] else ""
        yield f"the bits of {unequal[0]}{more}"


def _relative_difference(value: _Value) -> float:
    one, now = value.one.absmax, value.now.absmax
    return abs(one - now) / max(one, now)


def _count(found: Sequence[Any], noun: str) -> str:
    return f"{len(found):,} {noun}{'s' if len(found) != 1 else ''}"


def _both_losses(first: Trace, again: Trace) -> list[tuple[float, float]]:
    """The loss of each step in the run and in the replay; equal for the steps that the replay has taken over."""
    replayed = {metric.step: metric.values.get("loss") for metric in again.all(Metric)}
    found = ((metric.values.get("loss"), replayed.get(metric.step)) for metric in first.all(Metric))
    return [(one, now) for one, now in found if one is not None and now is not None]


def _both_bits(first: Trace, again: Trace) -> list[tuple[str, str, str]]:
    """Name, and digests in the run and in the replay, of each tensor that was compared bit by bit where the run fails."""
    one, other = _digests(first), _digests(again)
    return [(key[-2], *_alike(seen, other[key])) for key, seen in one.items() if key in other]


def _alike(one: FailingBits, now: FailingBits) -> tuple[str, str]:
    """What must be equal: digests of the tensor, and of the random state where both were taken when the tensor was made."""
    if not one.random or not now.random:
        return one.digest, now.digest
    return f"{one.digest} {one.random}", f"{now.digest} {now.random}"


def _digests(trace: Trace) -> dict[tuple[Any, ...], FailingBits]:
    times: Counter[tuple[Any, ...]] = Counter()
    found: dict[tuple[Any, ...], FailingBits] = {}
    for seen in trace.observed(FailingBits):
        name = f"{seen.what.name} of {seen.fqn}" if seen.fqn else seen.what.name
        where = (seen.step, seen.call, seen.phase, tuple(seen.what.shape), seen.what.dtype, name)
        times[where] += 1
        found[(*where, times[where])] = seen.what
    return found


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


def _is_close(one: Sample, other: Sample) -> bool:
    """Whether two samples differ no more than sums do that are added up in another order."""
    counts = (one.num_nan, one.num_inf) == (other.num_nan, other.num_inf)
    return counts and abs(one.absmax - other.absmax) <= ROUNDING * max(one.absmax, other.absmax)


def _words(sample: Sample) -> str:
    bad = f" with {sample.num_nan + sample.num_inf:,} inf or NaN" if not sample.finite else ""
    return f"{sample.absmax:.6g}{bad}"
