"""``rounded-result``: values that rounding has changed so far that the program does something else with them."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.incidents import incidents
from dtypedoctor.diagnosis.rule import SILENT, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import percent
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.rules import Statement, make_finding_of
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import (
    LostWrites,
    RoundedAngles,
    RoundedIndices,
    RoundedSum,
    RoundedUse,
)


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
    edits=("uncast-line", "half-to-float32", "bfloat16-to-float32"),
)

FEWEST = 0.05
"""Share of the results of a line that have to differ. Below it they may be scores that are nearly equal, or fractions close to a whole number."""
SETTLING = 8
"""Uses, the first of those below, of which each line is told."""
MANY = 1 / 3
"""Share of choices from which on they do not only differ where values are nearly equal."""
CONDITIONS = 3
"""Conditions at a line that have to differ: one comparison of two near numbers may be a coincidence."""
TIED, TIES = 0.01, 8
"""The same where the order of equal values decides, and how many at least: one row of a hundred may be a coincidence."""

_CHANGES = {
    "whole": "gives other whole numbers than float64, in which the numbers are whole before",
    "integer": "gives other whole numbers than the same operators do in float64",
    "imaginary": "cuts the imaginary part off",
    "restored": "takes away what was added before and does not get back what was there",
    "decision": "takes another decision than the same operators do in float64",
    "factor": "multiplies by 0, which it would not be in float64",
    "tie": "chooses by their order between values that are equal only after rounding",
    "step": "makes a step of 0 between two entries of a grid, which are apart in float64",
    "state": "leaves inf in memory that outlives the call, where the same operators in float64 leave finite values",
    "mask": "makes another mask than the same operators do in float64",
    "condition": "decides a condition otherwise than the same operators do in float64",
    "choice": "chooses others than the same operators do in float64, as often as not",
    "schedule": "uses a schedule of which neighboring entries are equal, and differ in float64",
    "distinct": "leaves fewer different whole numbers than the same operators do in float64",
    "draw": "draws what has the probability 0, or never what has one in float64",
    "drift": "computes a value from itself over and over, and it drifts away from that in float64",
}
"""What an operator does, by the use of its result; of one cause the first of these is told."""
_LOST = {
    "loss": "it is the loss that is differentiated",
    "gradient": "it goes on as a gradient",
    "input": "a layer takes it",
    "number": "Python reads it",
}
"""How a value is used of which half of the digits are lost; told where nothing above is."""
_COMPARING = frozenset({"to_copy", "copy", "add", "sub", "rsub"})
"""Operators of which a rounded result is no surprise where Python reads it."""
_ORDER = (*_CHANGES, *_LOST)
_WEAK = frozenset({"schedule", "drift", *_LOST})
"""Uses that say no more than what rounded sums, counts and angles are told of by."""


def detect_rounded_results(trace: Trace) -> Iterator[Finding]:
    """Lines that do something else with rounded values than with exact ones; what is written last of a line holds. Of one rounding the clearest use is told."""
    for uses in _by_cause(trace).values():
        uses.sort(key=lambda seen: _ORDER.index(seen.what.use))
        first = uses[0].what
        settled = [seen for seen in uses if seen.what.use == first.use and _ORDER.index(first.use) < SETTLING]
        for seen in settled or uses[:1]:
            what = seen.what
            yield make_finding_of(seen, _statement(what), dtype=what.dtype, op=what.op, source=what.source or None)


def _by_cause(trace: Trace) -> dict[str, list[Observed[RoundedUse]]]:
    """The uses that matter, by the line that has rounded first."""
    last = {(s.what.use, s.what.op, s.what.source, s.what.used_at): s for s in trace.observed(RoundedUse)}
    of_cause: dict[str, list[Observed[RoundedUse]]] = {}
    explained = _explained(trace)
    for seen in last.values():
        what = seen.what
        if what.nonfinite and incidents(trace):
            continue  # a consequence of what is told of as inf or NaN
        if what.changed and _matters(what) and not (what.use in _WEAK and {what.source, what.made_at} & explained):
            of_cause.setdefault(what.made_at, []).append(seen)
    return of_cause


def _explained(trace: Trace) -> set[str | None]:
    """Lines of which other findings say that they round sums, whole numbers, or angles."""
    lines: set[str | None] = {seen.what.source for seen in trace.observed(LostWrites) if seen.what.tensors}
    lines |= {seen.what.source for seen in trace.observed(RoundedSum)}
    lines |= {seen.what.source for seen in trace.observed(RoundedIndices)}
    lines |= {seen.what.source for seen in trace.observed(RoundedAngles)}
    return lines - {"", None}


def _matters(what: RoundedUse) -> bool:
    if what.use in _LOST:
        # who reads a difference of two copies, or what a cast leaves, compares them: tests do, and reports of errors
        meant = short_op(what.op).strip("_") in _COMPARING or float(what.value) == 0
        return what.use != "number" or not meant
    if what.use == "choice":
        return what.changed >= max(TIES, MANY * what.of)
    if what.use == "tie":
        return what.changed >= max(TIES, TIED * what.of)
    if what.use == "distinct":
        return what.changed >= max(TIES, FEWEST * what.of)
    if what.use in ("mask", "condition"):
        return what.changed >= max(TIES if what.use == "mask" else CONDITIONS, FEWEST * what.of)
    return what.use in ("whole", "draw", "factor") or what.changed >= FEWEST * what.of


def _statement(what: RoundedUse) -> Statement:
    line = what.source or "A line outside of modules"
    made = f" at {what.made_at}" if what.made_at and what.made_at != what.source else ""
    rounds = f"{short_op(what.made_by)}{made} rounds to {what.dtype}."
    if what.use in _LOST:
        used_at = f" at {what.used_at}" if what.used_at and what.used_at != what.source else ""
        summary = f"{line}: {short_op(what.op)} loses most of its digits ({what.value} instead of {what.exact}), and {_LOST[what.use]}{used_at}. {rounds}"
    else:
        summary = (
            f"{line}: {short_op(what.op)} {_CHANGES[what.use]}, for {what.changed:,} of {what.of:,} results: {what.value} instead of {what.exact}. "
            f"{rounds}"
        )
    return Statement(
        id="rounded-result",
        severity=Severity.WARNING,
        proven_by="the same operators in float64 give another result where it is used",
        summary=summary,
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
    name = op.split(".")[1] if op.startswith("aten.") else op
    return "item" if name == "_local_scalar_dense" else name


RULES = (Rule(name="rounded-results", specs=(SPEC,), detect=detect_rounded_results),)
