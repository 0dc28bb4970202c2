"""The observer certificate: did watching change the run?"""

import re

from dtypedoctor.runner.child import STDOUT
from dtypedoctor.runner.launch import Run
from dtypedoctor.trace.events import Metric, Raised, Resources
from dtypedoctor.trials.results import Observer

COMPARED = ("loss", "grad_norm", "reward")


def compare_unwatched(watched: Run, unwatched: Run) -> Observer:
    """Compares losses, gradient norms and the trained parameters of a watched run and an unwatched one, bit for bit."""
    if watched.died or unwatched.died:
        return Observer(bitwise_equal=None, reason="a worker died, so there is nothing to compare")
    end, end_unwatched = watched.trace.end, unwatched.trace.end
    if end is None or end_unwatched is None:
        return Observer(bitwise_equal=None, reason="a trace has no end")
    if end.outcome != end_unwatched.outcome:
        return Observer(
            bitwise_equal=False,
            reason=f"the run {_words(end.outcome)} when watched and {_words(end_unwatched.outcome)} when not",
        )
    difference = _difference(watched, unwatched)
    if difference:
        return Observer(bitwise_equal=False, reason=difference)
    steps = len(watched.trace.all(Metric))
    if not steps:
        reason = f"no step was finished, so there is nothing to compare{_as_far_as_seen(watched, unwatched)}"
        return Observer(bitwise_equal=None, reason=reason)
    return Observer(
        bitwise_equal=True,
        reason=f"{_compared(watched)} of {steps} step(s) and the trained parameters are equal with and without the watch",
    )


def _compared(run: Run) -> str:
    """What was there to compare, e.g. ``loss and grad_norm``."""
    metrics = run.trace.all(Metric)
    names = [name for name in COMPARED if any(name in m.values or name in m.nonfinite for m in metrics)]
    return " and ".join(names) or "the number"


def _as_far_as_seen(watched: Run, unwatched: Run) -> str:
    """For a script, what can be said without losses: how it ended and what it printed."""
    if not watched.foreign:
        return ""
    ours, theirs = ((run.directory / STDOUT).read_bytes() for run in (watched, unwatched))
    return f"; the script ended in the same way and printed {'the same' if ours == theirs else 'something else'}"


def _words(outcome: str) -> str:
    return {"completed": "completes", "raised": "raises"}.get(outcome, outcome)


def _text(raised: Raised) -> str:
    """What was raised; addresses of objects differ from process to process."""
    said = raised.message.split("from user code:", 1)[0]  # Dynamo quotes torch's own lines there, which hooks change
    return f"{raised.type}: {re.sub('0x[0-9a-f]+', '0x', said)}"


def _difference(watched: Run, unwatched: Run) -> str:
    ours, theirs = watched.trace.all(Metric), unwatched.trace.all(Metric)
    if len(ours) != len(theirs):
        return f"{len(ours)} steps when watched, {len(theirs)} when not"
    for one, other in zip(ours, theirs, strict=True):
        for name in COMPARED:
            if one.values.get(name) != other.values.get(name):
                return f"{name} of step {one.step} is {one.values.get(name)} when watched, {other.values.get(name)} when not"
    raised, raised_unwatched = watched.trace.last(Raised), unwatched.trace.last(Raised)
    if raised is not None and raised_unwatched is not None and _text(raised) != _text(raised_unwatched):
        return "the exceptions differ"
    if watched.exit.code != unwatched.exit.code:
        return f"the script {watched.exit.describe()} when watched, and {unwatched.exit.describe()} when not"
    mine, yours = watched.trace.last(Resources), unwatched.trace.last(Resources)
    if mine is not None and yours is not None and mine.checksum != yours.checksum:
        return "the trained parameters differ"
    return ""
