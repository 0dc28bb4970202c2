"""The observer certificate: did watching change the run?"""

import re
from collections.abc import Sequence
from dataclasses import replace

from dtypedoctor.analysis import analysis_of
from dtypedoctor.runner.run import STDOUT, Run
from dtypedoctor.trace.events import Metric, Raised, Resources
from dtypedoctor.trials.results import Observer

_SET = re.compile(r"\{([^{}:]*)\}")
"""How Python prints a set, in an order of its own in each process."""

COMPARED = ("loss", "grad_norm", "reward")


def compare_unwatched(watched: Run, unwatched: Run) -> Observer:
    """Compares losses, gradient norms and the trained parameters of a watched run and an unwatched one, bit for bit.

    Of several ranks each is compared with itself, and the worst of them counts.
    """
    if len(watched.ranks) == len(unwatched.ranks) > 0:
        each = [_compare(one, other) for one, other in zip(watched.ranks, unwatched.ranks, strict=True)]
        rank = min(range(len(each)), key=lambda number: _WORST_FIRST.index(each[number].bitwise_equal))
        everywhere = f"on each of {len(each)} ranks" if each[rank].bitwise_equal else f"on rank {rank}"
        return replace(each[rank], reason=f"{everywhere}, {each[rank].reason}")
    return _compare(watched, unwatched)


_WORST_FIRST = (False, None, True)


def _compare(watched: Run, unwatched: Run) -> Observer:
    if watched.died or unwatched.died:
        return Observer(bitwise_equal=None, reason="a worker died, so there is nothing to compare")
    end, end_unwatched = watched.trace.end, unwatched.trace.end
    if end is None or end_unwatched is None:
        return Observer(bitwise_equal=None, reason="a trace has no end")
    if end.outcome != end_unwatched.outcome:
        ours, theirs = _ending(watched, end.outcome), _ending(unwatched, end_unwatched.outcome)
        return Observer(bitwise_equal=False, reason=f"the run {ours} with instrumentation, and {theirs} without")
    if watched.trace.folded is not None or unwatched.trace.folded is not None:
        return _by_parameters(watched, unwatched)
    difference = _difference(watched, unwatched)
    if difference:
        return Observer(bitwise_equal=False, reason=difference)
    steps = len(watched.trace.all(Metric))
    if not steps:
        reason = f"{_nothing_to_compare(end.outcome)}{_as_far_as_seen(watched, unwatched)}"
        return Observer(bitwise_equal=None, reason=reason, same_error=end.outcome == "raised")
    trained = "the gradients and parameters after each of them" if watched.foreign else "the trained parameters"
    return Observer(
        bitwise_equal=True,
        reason=f"{_compared(watched)} of {steps} step(s) and {trained} are bitwise equal with and without instrumentation",
        same_error=end.outcome == "raised",
    )


def _nothing_to_compare(outcome: str) -> str:
    if outcome == "raised":
        return "the run raises the same error with and without instrumentation, before any step has numbers to compare"
    return "no step was completed, so there is nothing to compare"


def _by_parameters(watched: Run, unwatched: Run) -> Observer:
    """Long runs, of which not every step is kept: the trained parameters tell."""
    ours, theirs = watched.trace.last(Resources), unwatched.trace.last(Resources)
    if ours is None or theirs is None or ours.checksum is None or theirs.checksum is None:
        return Observer(bitwise_equal=None, reason="steps of so long a run are not all kept for comparison")
    equal = ours.checksum == theirs.checksum
    verdict = "are bitwise equal with and without instrumentation" if equal else "differ"
    return Observer(bitwise_equal=equal, reason=f"the trained parameters {verdict}")


def _compared(run: Run) -> str:
    """What was there to compare, e.g. ``loss, grad_norm``."""
    metrics = run.trace.all(Metric)
    names = [name for name in COMPARED if any(name in m.values or name in m.nonfinite for m in metrics)]
    return ", ".join(names) or "the number"


def _as_far_as_seen(watched: Run, unwatched: Run) -> str:
    """For a script, what can be said without losses: how it ended and what it printed."""
    if not watched.foreign:
        return ""
    ours, theirs = ((run.directory / STDOUT).read_bytes() for run in (watched, unwatched))
    return f"; the script ended in the same way and printed {'the same' if ours == theirs else 'something else'}"


def _ending(run: Run, outcome: str) -> str:
    raised = analysis_of(run.trace).uncaught
    if outcome == "raised" and raised is not None:
        return f"raises {raised.type} ({(raised.message.splitlines() or [''])[0][:160]})"
    return {"completed": "completes", "raised": "raises"}.get(outcome, outcome)


def _text(raised: Raised) -> str:
    """What was raised; addresses of objects differ from process to process."""
    said = raised.message.split("from user code:", 1)[0]  # Dynamo quotes torch's own lines there, which hooks change
    return f"{raised.type}: {_SET.sub(_sorted, re.sub('0x[0-9a-f]+', '0x', said))}"


def _sorted(printed: re.Match[str]) -> str:
    return ", ".join(sorted(printed[1].split(", ")))


def _difference(watched: Run, unwatched: Run) -> str:
    """In what the two runs differ first; empty where they do not."""
    metrics = _metric_difference(watched.trace.all(Metric), unwatched.trace.all(Metric))
    if metrics:
        return metrics
    raised, raised_unwatched = analysis_of(watched.trace).uncaught, analysis_of(unwatched.trace).uncaught
    if raised is not None and raised_unwatched is not None and _text(raised) != _text(raised_unwatched):
        return "the exceptions differ"
    if watched.exit.code != unwatched.exit.code:
        return f"the script {watched.exit.describe()} with instrumentation, and {unwatched.exit.describe()} without"
    mine, yours = watched.trace.last(Resources), unwatched.trace.last(Resources)
    if mine is not None and yours is not None and mine.checksum != yours.checksum:
        return "the trained parameters differ"
    return ""


def _metric_difference(ours: Sequence[Metric], theirs: Sequence[Metric]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} steps with instrumentation, {len(theirs)} without"
    for one, other in zip(ours, theirs, strict=True):
        for name in COMPARED:
            mine, yours = one.values.get(name), other.values.get(name)
            if mine != yours:
                return f"{name} of step {one.step} is {mine} with instrumentation, {yours} without"
    return ""
