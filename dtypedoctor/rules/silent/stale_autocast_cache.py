"""``stale-autocast-cache``: a layer that computes with an old copy of its weight."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.statement import Statement, make_finding_of
from dtypedoctor.diagnosis.wording import listed, named_module, short
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import StaleCopy

SPEC = FindingSpec(
    id="stale-autocast-cache",
    title="Autocast serves an old half-precision copy of a weight that has changed",
    family=SILENT,
    references=("https://github.com/X-GenGroup/Flow-Factory/issues/186", "https://github.com/NVIDIA/apex/issues/132"),
    ablations=("autocast-off", *OF_ANY_FINDING),
    needs="autocast-off",
)


def detect_stale_cache(trace: Trace) -> Iterator[Finding]:
    """A layer that autocast gives an old half-precision copy of its weight."""
    seen = trace.observed(StaleCopy)
    if not seen:
        return
    first = seen[0]
    what = first.what
    statement = Statement(
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
            f"Layers seen so: {listed([named_module(o.fqn) for o in seen])}.",
        ),
    )
    yield make_finding_of(first, statement, dtype=what.dtype, source=what.region)


RULES = (Rule(name="stale-autocast-cache", specs=(SPEC,), detect=detect_stale_cache),)
