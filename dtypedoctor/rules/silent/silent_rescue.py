"""``silent-rescue``: inf and NaN that are replaced in the middle of the model.

Inside of modules clamps and replacements are followed by a float32 run; overflows that nobody meant to rescue, which a norm or an activation
made finite again, are the non-finite family's findings. Outside of modules a guard that puts a number in place of each NaN is no failure
where the NaN was made of that element alone, as of 0/0. It is one where an infinity has gone into a sum over others: their values were
fine, and are gone with it.
"""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.ops import Ancestry, OpGraph, all_finite, ancestry, graph_of, has_nan, overload_free
from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.statement import Statement, found_in, located
from dtypedoctor.diagnosis.wording import class_of, limit_of, listed, max_of, number, short
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.rules.nonfinite.overflow import CAUSE_IN_A_NORM
from dtypedoctor.trace.events import Correction, Observed, Op
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import Absorbed, Overflowed

__all__ = ["detect_erased"]

SPEC = FindingSpec(
    id="silent-rescue",
    title="Clamping or nan_to_num replaces non-finite values in the middle of the model",
    family=SILENT,
    severity=Severity.WARNING,
    aliases=("masked-overflow",),
    references=(
        "https://github.com/unslothai/unsloth-zoo/pull/600",
        "https://github.com/huggingface/transformers/pull/9487",
    ),
    ablations=("autocast-off", *OF_ANY_FINDING),
    fits_wider_dtype=True,
)

HARMLESS = 0.05
"""Relative error below which the result is what float32 gives, but for rounding."""
CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "hardtanh", "minimum", "maximum"})
REPLACEMENTS = frozenset({"nan_to_num", "where", "masked_fill"})
ROOTS = frozenset({"sqrt", "rsqrt"})
DIVISIONS = frozenset({"div", "reciprocal"})
EDGE = 0.5
"""Share of a dtype's range from which on the bound of a clamp is meant to catch overflows; that of a ReLU6 is not."""


def detect_rescues(trace: Trace) -> Iterator[Finding]:
    """Clamps and replacements that take inf or NaN out of the middle of a model."""
    for seen in trace.observed(Absorbed):
        if _is_rescue(seen) and seen.what.rescued:
            yield _rescue(seen)
    yield from _rescued_by_corrections(trace)


def swallowed_overflows(trace: Trace) -> Iterator[Finding]:
    """Overflows after which the values are finite without anybody having wanted to rescue them.

    A result that differs from float32's is an error; one that does not is worth knowing, and no more than that.
    """
    for seen in trace.observed(Absorbed):
        if not _is_rescue(seen) and seen.what.rescued:
            yield from _swallowed(trace, seen)


def _is_rescue(seen: Observed[Absorbed]) -> bool:
    what = seen.what
    name = overload_free(what.op)
    if name == "nan_to_num":
        return True
    if name in REPLACEMENTS:
        return what.by_mask
    bounds = [*what.scalars, *map(str, what.bounds)]
    return name in CLAMPS and any(_is_edge(text, what.born.dtype) for text in bounds)


def _is_edge(text: str, dtype: str) -> bool:
    try:
        return EDGE * limit_of(dtype) <= abs(float(text)) < float("inf")
    except ValueError:
        return False


def _rescue(seen: Observed[Absorbed]) -> Finding:
    what, born = seen.what, seen.what.born
    said = Statement(
        id="silent-rescue",
        severity=Severity.WARNING,
        proven_by=_proof(seen),
        summary=(
            f"{what.op} in {short(seen.fqn)} replaces {what.rescued} elements that are not finite, in step {seen.step}."
        ),
        cause=(
            f"{born.op} at {born.source} overflows {born.dtype}, and {what.op} behind it puts other values in "
            "place of what was lost. No error is raised; the affected tokens continue with replaced values, and the weights that "
            "caused it get no gradient."
        ),
        evidence=tuple(_evidence(seen)),
    )
    return found_in(seen, said, dtype=born.dtype, op=what.op, source=what.source)


def _proof(seen: Observed[Absorbed]) -> str:
    """The float32 run of the ops between the overflow and the first finite result, as a clause."""
    born = seen.what.born
    return (
        f"{born.op} and what follows it up to {seen.what.op}, run again in float32, is finite everywhere: the result "
        f"reaches {born.float32:,.6g} where {born.dtype} overflows"
    )


def _evidence(seen: Observed[Absorbed]) -> Iterator[str]:
    what, born = seen.what, seen.what.born
    operands = " and ".join(map(number, born.operands))
    yield (
        f"{born.op} in {short(born.fqn)} has operands up to {operands}; its result reaches {number(born.float32)}, "
        f"{max_of(born.dtype)}: {born.bad} of {born.elements} elements overflow."
    )
    if len(what.through) > 1:
        yield f"From there to the first finite result: {', '.join(what.through)}."
    difference = what.relative_error
    yield (
        f"The result of {what.op} differs from that of the same operations in float32 by {difference:.2g} times its "
        "largest magnitude."
    )


def _rescued_by_corrections(trace: Trace) -> Iterator[Finding]:
    last = {record.id: record for record in trace.all(Correction) if record.installed}
    for record in last.values():
        if record.rescued:
            said = Statement(
                id="silent-rescue",
                severity=Severity.WARNING,
                proven_by="the correction counts the elements that it replaces",
                summary=f"The correction {record.id} replaced {record.rescued} elements that were not finite.",
                cause="What comes before the corrected operation is not finite already; the correction hides it.",
                evidence=(f"{record.rescued} elements rescued and {record.clamped} clamped in {record.hits} calls.",),
            )
            yield located(said, phase=None)


def _swallowed(trace: Trace, seen: Observed[Absorbed]) -> Iterator[Finding]:
    what, born = seen.what, seen.what.born
    if born.negative:
        return  # a mask that has become -inf, say: to what follows it is as good as any very negative number
    harmful = what.relative_error > HARMLESS
    norm = harmful and born.squares and _takes_root(born, what)
    name = "norm-square-overflow" if norm else "float16-overflow"
    ends = (
        "and the result is wrong"
        if harmful
        else f"and {what.op} makes of it what it makes of the float32 value as well"
    )
    said = Statement(
        id=name,
        proven_by=_proof(seen),
        severity=Severity.ERROR if harmful else Severity.INFO,
        summary=(
            f"{born.op} in {short(born.fqn)} overflows {born.dtype} in step {seen.step}, leaves nothing but finite "
            f"values behind, {ends}."
        ),
        cause=CAUSE_IN_A_NORM if norm else _cause(what, born),
        evidence=tuple(_evidence(seen)),
    )
    yield located(
        said,
        phase=seen.phase,
        step=seen.step,
        fqn=born.fqn,
        op=born.op,
        dtype=born.dtype,
        source=born.source,
        cls=class_of(trace, born.fqn or ""),
    )


def _takes_root(born: Overflowed, what: Absorbed) -> bool:
    after = {overload_free(name) for name in what.through}
    length = overload_free(born.op) in ("linalg_vector_norm", "norm")
    return bool(after & ROOTS) or (length and bool(after & DIVISIONS))


def _cause(what: Absorbed, born: Overflowed) -> str:
    return (
        f"{born.op} at {born.source} makes inf of finite operands; {what.op} at {what.source} makes finite values "
        "of the inf, so that no check for inf or NaN sees it."
    )


def detect_erased(trace: Trace) -> Iterator[Finding]:
    """One finding for each line that replaces such NaN."""
    graph = graph_of(trace)
    told: set[str | None] = set()
    for op in graph.ops:
        if op.sentinel and op.source not in told and _replaces_nan(op) and (found := _spread(graph, op)) is not None:
            told.add(op.source)
            yield found


def _replaces_nan(op: Op) -> bool:
    floats = [t for t in op.outputs if t.dtype in DTYPES]
    return bool(floats) and all(t.finite for t in floats) and any(map(has_nan, op.inputs))


def _spread(graph: OpGraph, op: Op) -> Finding | None:
    found = ancestry(graph, op)
    if any(all_finite(maker.inputs) for maker in found.nan_makers):
        return None  # 0/0: no infinity is needed for that
    infinities = _infinities_behind(found)
    replaced = max(t.num_nan for t in op.inputs)
    if not 0 < infinities < replaced:
        return None
    sources = [source.source for source in (*found.asked, *found.computed) if source.source]
    return _of_a_group(op, replaced, infinities, sources, found.nan_makers)


def _infinities_behind(found: Ancestry) -> int:
    """How many infinite elements were made, or came in, before anything was NaN."""
    made = [tensor for op in (*found.asked, *found.computed) for tensor in op.outputs]
    tensors = {tensor.id: tensor for tensor in (*made, *(given for _, given in found.given))}
    return sum(tensor.num_posinf + tensor.num_neginf for tensor in tensors.values())


def _of_a_group(op: Op, replaced: int, infinities: int, sources: list[str], makers: tuple[Op, ...]) -> Finding:
    lost = replaced - infinities
    count = "1 infinity" if infinities == 1 else f"{infinities:,} infinities"
    begin = f" made at {listed(list(dict.fromkeys(sources)))}" if sources else " in the input"
    statement = Statement(
        id="silent-rescue",
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        summary=f"{op.op} replaces {replaced:,} NaN that {count} made of a whole group: {lost:,} finite values are lost with them.",
        cause=(
            f"{count}{begin} went into a mean, a sum or a norm over other values, and the results are NaN for all of them; {op.op} at "
            f"{op.source} puts numbers in their place. No error is raised, and nothing is learned from these values. Give such elements "
            "a finite value, or leave them out before the mean."
        ),
        evidence=tuple(f"{maker.op} at {maker.source} makes NaN of infinities." for maker in makers[:3]),
    )
    return located(statement, phase=op.phase, step=op.step, op=op.op, source=op.source, dtype=op.outputs[0].dtype)


RULES = (
    Rule(name="rescues", specs=(SPEC,), detect=detect_rescues),
    Rule(name="erased", specs=(SPEC,), detect=detect_erased),
)
