"""``rounded-result``: values that rounding has changed so far that the program does something else with them."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.incidents import incidents
from dtypedoctor.diagnosis.rule import SILENT, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import percent
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.rules import Statement, make_finding_of
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import RoundedUse


def _of_float32(finding: Finding) -> str:
    """What to do where float32 is not enough; empty for half precision."""
    if finding.dtype != "float32":
        return ""
    return (
        "Take away what all values have in common (an origin, a mean) before, or compute what is decided by in float64."
    )


SPEC = FindingSpec(
    id="rounded-result",
    title="Rounding changes what the program decides, indexes or keeps",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/Comfy-Org/ComfyUI/pull/16001",
        "https://github.com/huggingface/trl/issues/6688",
    ),
    do_this="Compute what is decided by (positions, schedules, distances, counts) in float32, from the line that first rounds it on.",
    instead=_of_float32,
)

FEWEST = 0.05
"""Share of the results of a line that have to differ. Below it they may be scores that are nearly equal, or fractions close to a whole number."""
TIED, TIES = 0.01, 8
"""The same where the order of equal values decides, and how many at least: one row of a hundred may be a coincidence."""

_CHANGES = {
    "restored": "takes away what was added before and does not get back what was there",
    "tie": "chooses by their order between values that are equal only after rounding",
    "whole": "gives other whole numbers than float64, in which the numbers are whole before",
    "decision": "takes another decision than the same operators do in float64",
    "step": "makes a step of 0 between two entries of a grid, which are apart in float64",
    "imaginary": "cuts the imaginary part off",
    "integer": "gives other whole numbers than the same operators do in float64",
    "state": "leaves inf in memory that outlives the call, where the same operators in float64 leave finite values",
}


def detect_rounded_results(trace: Trace) -> Iterator[Finding]:
    """Lines that do something else with rounded values than with exact ones; what is written last of a line holds."""
    last = {(seen.what.use, seen.what.op, seen.what.source): seen for seen in trace.observed(RoundedUse)}
    for seen in last.values():
        what = seen.what
        if what.nonfinite and incidents(trace):
            continue  # a consequence of what is told of as inf or NaN
        if what.changed and _matters(what):
            yield make_finding_of(seen, _statement(what), dtype=what.dtype, op=what.op, source=what.source or None)


def _matters(what: RoundedUse) -> bool:
    if what.use == "tie":
        return what.changed >= max(TIES, TIED * what.of)
    return what.use == "whole" or what.changed >= FEWEST * what.of


def _statement(what: RoundedUse) -> Statement:
    line = what.source or "A line outside of modules"
    made = f" at {what.made_at}" if what.made_at and what.made_at != what.source else ""
    return Statement(
        id="rounded-result",
        severity=Severity.WARNING,
        proven_by="the same operators in float64 give another result where it is used",
        summary=(
            f"{line}: {short_op(what.op)} {_CHANGES[what.use]}, for {what.changed:,} of {what.of:,} results: {what.value} instead of {what.exact}. "
            f"{short_op(what.made_by)}{made} rounds to {what.dtype}."
        ),
        cause=(
            f"The spacing of {what.dtype} numbers is {DTYPES[what.dtype].epsilon:.3g} of their magnitude. Values that lie closer become one, differences between near values lose "
            f"their digits, and what is beyond {DTYPES[what.dtype].max:,.6g} is inf. Each operator from the first rounding to the line that uses the values was run in float64 beside the real one."
        ),
        evidence=(
            f"{what.changed:,} of {what.of:,} results differ ({percent(what.changed / what.of)}).",
            f"First rounded by {what.made_by}{made}.",
        ),
    )


def short_op(op: str) -> str:
    """``argmin`` of ``aten.argmin.default``."""
    return op.split(".")[1] if op.startswith("aten.") else op


RULES = (Rule(name="rounded-results", specs=(SPEC,), detect=detect_rounded_results),)
