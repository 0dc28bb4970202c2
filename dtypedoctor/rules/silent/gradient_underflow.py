"""``gradient-underflow``: float16 gradients that are rounded to zero."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.statement import Statement, make_finding_of
from dtypedoctor.diagnosis.wording import listed, module_of, short_parameter
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Observed, ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import GradientZeros, ScaledBackward, ScaledGradient

SPEC = FindingSpec(
    id="gradient-underflow",
    title="Gradients are flushed to zero in float16",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/huggingface/transformers/issues/25021",
        "https://github.com/google/gemma_pytorch/issues/24",
    ),
    remedies=("bfloat16",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    fits_wider_dtype=True,
)

REVIVED = 0.1
"""Share of a parameter's gradient that has to come back under a scaled loss."""


def detect_underflow(trace: Trace) -> Iterator[Finding]:
    """Float16 gradients that are zero, and are not when the loss is scaled."""
    seen = next(reversed(trace.observed(ScaledBackward)), None)
    if seen is None or trace.all(ScalerState) or seen.what.error is not None:
        return
    revived = {name: one for name, one in seen.what.parameters.items() if _share_revived(one) >= REVIVED}
    if revived:
        yield _underflow(trace, seen, dict(sorted(revived.items(), key=lambda pair: -_share_revived(pair[1]))))


def _share_revived(one: ScaledGradient) -> float:
    return (one.zeros - one.zeros_scaled) / one.elements if one.elements else 0.0


def _underflow(trace: Trace, seen: Observed[ScaledBackward], revived: dict[str, ScaledGradient]) -> Finding:
    name, worst = next(iter(revived.items()))
    first = next(iter(trace.observed(GradientZeros)), None) or seen
    smallest = DTYPES["float16"].smallest
    statement = Statement(
        id="gradient-underflow",
        severity=Severity.WARNING,
        proven_by=f"with the loss multiplied by {seen.what.scale:g} the same backward pass gives gradients that are not zero",
        summary=(
            f"{100 * worst.zeros / worst.elements:.0f}% of the gradient of {short_parameter(name)} is flushed to zero in float16: "
            "there is no loss scaler."
        ),
        cause=(
            f"The smallest positive float16 is {smallest:.2g}; what is below half of that becomes zero. A loss scaler multiplies "
            "the loss before the backward pass so that small gradients stay above it, and divides them in float32 afterwards."
        ),
        evidence=(
            *(
                f"{one}: {it.zeros} of {it.elements} elements are zero; with the loss multiplied by "
                f"{seen.what.scale:g}, {it.zeros_scaled} are. The largest that came back is {it.largest:.3g}."
                for one, it in list(revived.items())[:3]
            ),
            f"Parameters with lost gradients: {listed(list(revived))}.",
        ),
    )
    return replace(make_finding_of(first, statement, dtype="float16"), fqn=module_of(name), phase="backward")


RULES = (Rule(name="gradient-underflow", specs=(SPEC,), detect=detect_underflow),)
