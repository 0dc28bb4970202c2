"""The observer certificate: did watching change the run?"""

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
        return Observer(bitwise_equal=None, reason="no step was finished, so there is nothing to compare")
    return Observer(
        bitwise_equal=True,
        reason=f"losses and gradient norms of {steps} step(s) and the trained parameters are equal with and without the watch",
    )


def _words(outcome: str) -> str:
    return {"completed": "completes", "raised": "raises"}.get(outcome, outcome)


def _difference(watched: Run, unwatched: Run) -> str:
    ours, theirs = watched.trace.all(Metric), unwatched.trace.all(Metric)
    if len(ours) != len(theirs):
        return f"{len(ours)} steps when watched, {len(theirs)} when not"
    for one, other in zip(ours, theirs, strict=True):
        for name in COMPARED:
            if one.values.get(name) != other.values.get(name):
                return f"{name} of step {one.step} is {one.values.get(name)} when watched, {other.values.get(name)} when not"
    raised, raised_unwatched = watched.trace.last(Raised), unwatched.trace.last(Raised)
    if raised is not None and raised_unwatched is not None and raised.message != raised_unwatched.message:
        return "the exceptions differ"
    mine, yours = watched.trace.last(Resources), unwatched.trace.last(Resources)
    if mine is not None and yours is not None and mine.checksum != yours.checksum:
        return "the trained parameters differ"
    return ""
