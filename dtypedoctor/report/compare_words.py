"""What is said about two compared runs: the verdict in a sentence, where they part, and why they are not called equal."""

from collections.abc import Iterator

from dtypedoctor.report.numbers import count, counted, number
from dtypedoctor.trials.comparison import Difference, Divergence, Measured, TraceComparison, Verdict

__all__ = ["difference_words", "headline", "place_words", "reasons", "when_words"]

_MOST_STEPS = 5


def headline(found: TraceComparison) -> str:
    """The outcome in one or two sentences, the verdict first."""
    why = reasons(found)
    if found.verdict is Verdict.EQUAL:
        return f"EQUAL: {counted(found.compared, 'measurement')} in both runs {_agreement(found)}.{_extras(found)}"
    if found.verdict is Verdict.INCOMPLETE:
        nothing = not found.compared and not _shared_numbers(found)
        return f"NOTHING COMPARED: {why[0]}" if nothing else f"INCOMPLETE: what both have agrees, but {why[0]}"
    if found.first is None:
        return f"DIVERGED: {why[0]}"
    first, other = found.first, found.first_nonfinite
    if other is None or other == first:
        return (
            f"DIVERGED: {place_words(first)} is the first to differ, in {when_words(first)}: {difference_words(first)}."
        )
    return (  # a NaN or inf that only one has matters more than the drift that comes before it
        f"DIVERGED: {place_words(other)}, in {when_words(other)}: {difference_words(other)}. Before that, finite values "
        f"differ first in {place_words(first)}, in {when_words(first)}: {difference_words(first)}."
    )


def reasons(found: TraceComparison) -> list[str]:
    """Everything for which the two are not called equal, divergences first; empty for equal runs."""
    return [*_divergences(found), *_gaps(found)]


def place_words(place: Divergence) -> str:
    """The tensor that differs."""
    what = {
        "backward": "the gradient of the output of {}",
        "gradient": "the gradient of {}",
        "parameter": "the parameter {}",
        "loss": "the loss",
    }
    named = (place.fqn or place.cls or "the model") + (f" (output {place.path})" if place.path else "")
    return what.get(place.lane, "{}").format(named)


def when_words(place: Divergence) -> str:
    """The step, the part of it, and which call."""
    nth = f", call {place.nth} of the step" if place.nth > 1 else ""
    return f"step {place.step} ({place.lane}{nth})"


def difference_words(place: Divergence) -> str:
    """In what the two differ there."""
    a, b = place.a, place.b
    if a is None or b is None:
        return f"only {'A' if b is None else 'B'} makes this call"
    if place.difference is Difference.SHAPE:
        return f"its shape is {list(a.shape)} in A and {list(b.shape)} in B"
    if place.difference is Difference.NONFINITE:
        return f"A {_finiteness(a)}, B {_finiteness(b)}"
    error = f" (relative error {number(place.error)})" if place.error is not None else ""
    return f"absmax is {number(a.absmax)} in A and {number(b.absmax)} in B{error}"


def _finiteness(measured: Measured) -> str:
    parts = [
        f"{count(amount)} {name}" for amount, name in ((measured.num_inf, "inf"), (measured.num_nan, "NaN")) if amount
    ]
    return f"holds {' and '.join(parts)}" if parts else "is finite"


def _agreement(found: TraceComparison) -> str:
    if found.equal == found.compared:
        return "agree in every digit that traces keep"
    return f"agree within {number(found.tolerance)}, {count(found.equal) if found.equal else 'none'} of them in every digit that traces keep"


def _extras(found: TraceComparison) -> str:
    extras = sum(one.tensors for one in found.missing)
    words = counted(extras, "measurement")
    return f" Set aside: {words} of further outputs, which only one run's modules return." if extras else ""


def _shared_numbers(found: TraceComparison) -> bool:
    return any(len(metric.steps) > len(metric.lone) for metric in found.metrics)


def _divergences(found: TraceComparison) -> Iterator[str]:
    if found.ends_differ:
        yield f"the runs ended differently: A: {found.a.ended}; B: {found.b.ended}"
    if found.beyond:
        yield (
            f"{count(found.beyond)} of {counted(found.compared, 'measurement')} in both disagree: "
            f"by more than {number(found.tolerance)}, in shape, or in NaN or inf"
        )
    first = found.first
    if first is not None and first.difference in (Difference.ONLY_A, Difference.ONLY_B):
        yield f"{place_words(first)} is called once more in one run than in the other, in {when_words(first)}"
    for metric in found.metrics:
        if metric.beyond:
            yield f"{metric.name} differs in {_steps(metric.beyond)}"
    apart = [probe.step for probe in found.logprobs if probe.error > found.tolerance_at(probe.step) or probe.unmatched]
    if apart:
        yield f"the log-probabilities on the probe batch differ after {_steps(tuple(apart))}"
    if found.tolerance == 0 and found.parameters_equal is False:
        yield "the trained parameters are not bitwise equal"


def _steps(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:_MOST_STEPS]))
    more = f" and {count(len(steps) - _MOST_STEPS)} more" if len(steps) > _MOST_STEPS else ""
    return f"step{'s' if len(steps) > 1 else ''} {shown}{more}"


def _gaps(found: TraceComparison) -> Iterator[str]:
    for name, side in (("A", found.a), ("B", found.b)):
        if not side.watched:
            yield f"{name} was not watched, so no tensor of it was measured"
        elif not side.tensors:
            yield f"no tensor was measured in {name}"
        if not side.complete:
            yield f"the trace of {name} is cut short: it has no end record"
        yield from (f"the trace of {name} is damaged: {damage}" for damage in side.damage)
    for side_name in ("A", "B"):
        modules = sum(one.whole for one in found.missing if one.only_in == side_name)
        parts = sum(not one.whole and not one.extra for one in found.missing if one.only_in == side_name)
        if modules:
            yield f"{counted(modules, 'module or parameter', 'modules or parameters')} measured in {side_name} only"
        if parts:
            yield f"{counted(parts, 'tensor')} of modules that both have measured in {side_name} only"
    yield from _surplus(found)


def _surplus(found: TraceComparison) -> Iterator[str]:
    """Calls and steps that one run has more of, though the other knows the module."""
    for name in ("A", "B"):
        calls = found.surplus(name)
        if calls:
            yield f"{counted(calls, 'measurement')} of {name} without a counterpart: the other run made fewer calls or steps"
    steps = sorted({step for metric in found.metrics for step in metric.lone})
    if steps:
        yield f"only one run reports its numbers for {_steps(tuple(steps))}"
