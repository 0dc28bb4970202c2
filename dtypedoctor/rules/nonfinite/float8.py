"""``float8-range``: values cast to float8 without a scale that fits them, which become inf, the largest number, or zero."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.nonfinite_origin import Origin
from dtypedoctor.diagnosis.ops import overload_free
from dtypedoctor.diagnosis.rule import SILENT, Finding, FindingSpec, Rule
from dtypedoctor.diagnosis.wording import limit_of, listed, named_module, number, percent, place, short
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.rules import Statement, make_finding_at, make_finding_of
from dtypedoctor.rules.nonfinite.overflow import needs, overflow_evidence, proof
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import Float8Cast

FLOAT8_RANGE = FindingSpec(
    id="float8-range",
    title="Values are cast to float8 without a scale that fits them",
    family=SILENT,
    references=(
        "https://github.com/NVIDIA/Megatron-LM/issues/442",
        "https://github.com/NVIDIA/TransformerEngine/pull/825",
        "https://github.com/pytorch/pytorch/pull/178817",
    ),
    do_this="Multiply by a scale before the cast to {dtype} (its largest value over the tensor's absmax), keep the scale, and divide by it after the cast back.",
)
_CASTS = frozenset({"_to_copy", "to", "copy_", "copy"})


def judge_float8(origin: Origin) -> Finding | None:
    """A cast to a float8 dtype that has inf, of values beyond its range."""
    op, dtype = origin.op, origin.result.dtype
    if not dtype.startswith("float8") or overload_free(op.op) not in _CASTS or not origin.leaves_a_narrow_range:
        return None
    statement = Statement(
        id="float8-range",
        proven_by=proof(origin),
        summary=f"A cast to {dtype} in {short(place(op))} overflows in step {op.step} ({op.phase}): {needs(origin)}.",
        cause=f"{_reach(dtype)} {op.op} at {op.source} casts larger values, and they become inf.",
        evidence=tuple(overflow_evidence(origin)),
    )
    return make_finding_at(origin, statement)


def detect_float8_casts(trace: Trace) -> Iterator[Finding]:
    """Casts to float8 that lose what a scale would keep; a line of code tells once of all its modules."""
    by_line: dict[tuple[str | None, str], list[Observed[Float8Cast]]] = {}
    for one in trace.observed(Float8Cast):
        by_line.setdefault((one.what.source, one.what.to), []).append(one)
    for seen, *others in by_line.values():
        what = seen.what
        statement = Statement(
            id="float8-range",
            proven_by=(
                f"the same values, multiplied by {limit_of(what.to):g} / absmax before the cast and divided after it, differ from what they were by "
                f"{what.scaled_error:.2g} of their norm, and as the program casts them by {what.relative_error:.2g}"
            ),
            summary=f"{short(seen.fqn)} casts {what.from_} to {what.to} without a scale that fits in step {seen.step}: {_lost(what)}.",
            cause=f"{_reach(what.to)} Values outside of that are clipped or become 0, and nothing raises.",
            evidence=(
                f"The largest magnitude before the cast is {number(what.absmax)}.",
                f"{what.clipped:,} of {what.elements:,} elements are clipped, {what.vanished:,} become 0.",
                *((f"The same line does so in {listed([named_module(o.fqn) for o in others])}.",) if others else ()),
            ),
        )
        yield make_finding_of(seen, statement, dtype=what.to, op=what.op, source=what.source)


def _reach(dtype: str) -> str:
    known = DTYPES[dtype]
    return f"{dtype} reaches from {known.smallest:.3g} to {known.max:,.6g}."


def _lost(what: Float8Cast) -> str:
    if what.clipped >= what.vanished:
        return f"{percent(what.clipped / what.elements)} of the elements become {limit_of(what.to):,.6g} or -{limit_of(what.to):,.6g}"
    return f"{percent(what.vanished / what.elements)} of the elements become 0"


RULES = (Rule(name="float8-casts", priority=120, specs=(FLOAT8_RANGE,), detect=detect_float8_casts),)
