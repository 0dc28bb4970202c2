"""``router-flip``: routers that choose other experts than with scores in float32."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.statement import Statement, make_finding_of
from dtypedoctor.diagnosis.wording import listed, named_module, short
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import RouterChoice

SPEC = FindingSpec(
    id="router-flip",
    title="Half-precision router scores choose other experts than float32 would",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/vllm-project/vllm/pull/14027", "https://github.com/sgl-project/sglang/pull/33764"),
)

FLIPPED = 0.005
"""Share of tokens from which on a router's choice is called unstable."""
FLIPPED_TOKENS = 2


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
    statement = Statement(
        id="router-flip",
        proven_by=f"with {what.scores_op} in float32 on the same operands {what.flipped} tokens choose other experts",
        severity=Severity.WARNING,
        summary=(
            f"{short(seen.fqn)} routes {100 * what.flipped / what.tokens:.2g}% of the tokens to other experts than "
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
            f"Routers seen so: {listed([named_module(o.fqn) for o in flipping])}.",
        ),
    )
    yield make_finding_of(seen, statement, dtype=what.dtype, op=what.scores_op, source=what.scores_source)


RULES = (Rule(name="router-flips", specs=(SPEC,), detect=detect_router_flips),)
