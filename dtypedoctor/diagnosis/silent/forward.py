"""What a forward pass computes with the wrong numbers: stale copies, cut-off activations, other experts."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.observations import observed
from dtypedoctor.diagnosis.statement import Statement, found_in
from dtypedoctor.diagnosis.wording import listed, short
from dtypedoctor.trace.events import Observation
from dtypedoctor.trace.reader import Trace

FLIPPED = 0.005
"""Share of tokens from which on a router's choice is called unstable."""
FLIPPED_TOKENS = 2


def detect_stale_cache(trace: Trace) -> Iterator[Finding]:
    """A layer that autocast gives an old half-precision copy of its weight."""
    seen = list(observed(trace, "autocast-cache"))
    if not seen:
        return
    first = seen[0]
    values = first.values
    said = Statement(
        id="stale-autocast-cache",
        proven_by=f"the same layer run again without autocast's cache differs by {values['relative_error']:.2g} of its largest magnitude",
        summary=(
            f"{short(values['fqn'])} computes with an old {values['dtype']} copy of its weight in step {first.step}: the weight "
            "has changed inside one autocast region."
        ),
        cause=(
            "Autocast keeps the half-precision copy of a float32 weight until the outermost region ends, and does not look "
            f"whether the weight has changed since. The region at {values['region']} is open across the change."
        ),
        evidence=(
            (
                f"{values['weight']} differs from what it was at the first call in the region; run again without the cache, the "
                f"layer's result differs by {values['relative_error']:.2g} of its largest magnitude."
            ),
            f"Layers seen so: {listed([_module(o) for o in seen])}.",
        ),
    )
    yield found_in(first, said, dtype=values["dtype"], source=values["region"])


def detect_integer_casts(trace: Trace) -> Iterator[Finding]:
    """Activations that went through an integer dtype and came back as numbers; a line of code tells once of all its modules."""
    by_line: dict[tuple[str, ...], list[Observation]] = {}
    for one in observed(trace, "float-to-int"):
        by_line.setdefault((one.values["op"], one.values["source"], one.values["to"]), []).append(one)
    for seen, *others in by_line.values():
        values = seen.values
        said = Statement(
            id="float-to-int-cast",
            proven_by=f"the activation before the cast differs from what is used by {values['relative_error']:.3g} times its norm",
            summary=f"{short(values['fqn'])} casts an activation from {values['from']} to {values['to']} in step {seen.step}.",
            cause=(
                f"A cast to {values['to']} cuts fractions off, and what lies outside of its range has no defined result. The "
                f"integers are used as numbers again by {values['used_by']} at {values['used_at']}, so every dtype after that "
                "looks right. A common reason is `x.to(layer.weight.dtype)` with a packed weight."
            ),
            evidence=(
                (
                    f"The {values['elements']} integers differ from the activation by {values['relative_error']:.3g} times its "
                    "Euclidean norm."
                ),
                "They are never used to look something up.",
                *((f"The same line does so in {listed([_module(o) for o in others])}.",) if others else ()),
            ),
        )
        yield found_in(seen, said, dtype=values["to"], op=values["op"], source=values["source"])


def _module(seen: Observation) -> str:
    return seen.values["fqn"] or "(the outermost module)"


def detect_router_flips(trace: Trace) -> Iterator[Finding]:
    """Routers that choose other experts than they would with scores in float32; the worst one speaks for all."""
    flipping = [
        o
        for o in observed(trace, "router")
        if o.values["flipped"] >= FLIPPED_TOKENS and o.values["flipped"] > FLIPPED * o.values["tokens"]
    ]
    if not flipping:
        return
    seen = max(flipping, key=lambda o: o.values["flipped"] / o.values["tokens"])
    values = seen.values
    said = Statement(
        id="router-flip",
        proven_by=f"with {values['scores_op']} in float32 on the same operands {values['flipped']} tokens choose other experts",
        severity=Severity.WARNING,
        summary=(
            f"{short(values['fqn'])} routes {100 * values['flipped'] / values['tokens']:.2g} % of the tokens to other experts than "
            f"in float32: its scores are {values['dtype']}."
        ),
        cause=(
            f"The selection of {values['chosen']} of {values['experts']} experts is discontinuous: scores that differ by less than "
            f"the rounding of {values['dtype']} swap, and the token goes through another network."
        ),
        evidence=(
            (
                f"{values['flipped']} of {values['tokens']} tokens have another set of experts when {values['scores_op']} runs in "
                "float32 on the same operands; everything up to the selection was run again."
            ),
            f"For {values['tied']} tokens the scores on both sides of the border are equal.",
            f"Routers seen so: {listed([_module(o) for o in flipping])}.",
        ),
    )
    yield found_in(seen, said, dtype=values["dtype"], op=values["scores_op"], source=values["scores_source"])
