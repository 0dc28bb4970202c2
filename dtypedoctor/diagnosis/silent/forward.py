"""What a forward pass computes with the wrong numbers: stale copies, cut-off activations, other experts."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.statement import Statement, found_in
from dtypedoctor.diagnosis.wording import listed, short
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.silent import FloatToInt, RouterChoice, StaleCopy

FLIPPED = 0.005
"""Share of tokens from which on a router's choice is called unstable."""
FLIPPED_TOKENS = 2


def detect_stale_cache(trace: Trace) -> Iterator[Finding]:
    """A layer that autocast gives an old half-precision copy of its weight."""
    seen = trace.observed(StaleCopy)
    if not seen:
        return
    first = seen[0]
    what = first.what
    said = Statement(
        id="stale-autocast-cache",
        proven_by=f"the same layer run again without autocast's cache differs by {what.relative_error:.2g} of its largest magnitude",
        summary=(
            f"{short(first.fqn)} computes with an old {what.dtype} copy of its weight in step {first.step}: the weight "
            "has changed inside one autocast region."
        ),
        cause=(
            "Autocast keeps the half-precision copy of a float32 weight until the outermost region ends, and does not look "
            f"whether the weight has changed since. The region at {what.region} is open across the change."
        ),
        evidence=(
            (
                f"{what.weight} differs from what it was at the first call in the region; run again without the cache, the "
                f"layer's result differs by {what.relative_error:.2g} of its largest magnitude."
            ),
            f"Layers seen so: {listed([_module(o) for o in seen])}.",
        ),
    )
    yield found_in(first, said, dtype=what.dtype, source=what.region)


def detect_integer_casts(trace: Trace) -> Iterator[Finding]:
    """Activations that went through an integer dtype and came back as numbers; a line of code tells once of all its modules."""
    by_line: dict[tuple[str | None, ...], list[Observed[FloatToInt]]] = {}
    for one in trace.observed(FloatToInt):
        by_line.setdefault((one.what.op, one.what.source, one.what.to), []).append(one)
    for seen, *others in by_line.values():
        what = seen.what
        said = Statement(
            id="float-to-int-cast",
            proven_by=f"the activation before the cast differs from what is used by {what.relative_error:.3g} times its norm",
            summary=f"{short(seen.fqn)} casts an activation from {what.from_} to {what.to} in step {seen.step}.",
            cause=(
                f"A cast to {what.to} cuts fractions off, and what lies outside of its range has no defined result. The "
                f"integers are used as numbers again by {what.used_by} at {what.used_at}, so every dtype after that "
                "looks right. A common reason is `x.to(layer.weight.dtype)` with a packed weight."
            ),
            evidence=(
                (
                    f"The {what.elements} integers differ from the activation by {what.relative_error:.3g} times its "
                    "Euclidean norm."
                ),
                "They are never used to look something up.",
                *((f"The same line does so in {listed([_module(o) for o in others])}.",) if others else ()),
            ),
        )
        yield found_in(seen, said, dtype=what.to, op=what.op, source=what.source)


def _module(seen: Observed[object]) -> str:
    return seen.fqn or "(the outermost module)"


def detect_router_flips(trace: Trace) -> Iterator[Finding]:
    """Routers that choose other experts than they would with scores in float32; the worst one speaks for all."""
    flipping = [
        o
        for o in trace.observed(RouterChoice)
        if o.what.flipped >= FLIPPED_TOKENS and o.what.flipped > FLIPPED * o.what.tokens
    ]
    if not flipping:
        return
    seen = max(flipping, key=lambda o: o.what.flipped / o.what.tokens)
    what = seen.what
    said = Statement(
        id="router-flip",
        proven_by=f"with {what.scores_op} in float32 on the same operands {what.flipped} tokens choose other experts",
        severity=Severity.WARNING,
        summary=(
            f"{short(seen.fqn)} routes {100 * what.flipped / what.tokens:.2g} % of the tokens to other experts than "
            f"in float32: its scores are {what.dtype}."
        ),
        cause=(
            f"The selection of {what.chosen} of {what.experts} experts is discontinuous: scores that differ by less than "
            f"the rounding of {what.dtype} swap, and the token goes through another network."
        ),
        evidence=(
            (
                f"{what.flipped} of {what.tokens} tokens have another set of experts when {what.scores_op} runs in "
                "float32 on the same operands; everything up to the selection was run again."
            ),
            f"For {what.tied} tokens the scores on both sides of the border are equal.",
            f"Routers seen so: {listed([_module(o) for o in flipping])}.",
        ),
    )
    yield found_in(seen, said, dtype=what.dtype, op=what.scores_op, source=what.scores_source)
