"""``silent-rescue``: inf and NaN that are replaced in the middle of the model.

Inside of modules clamps and replacements are followed by a float32 run; overflows that nobody meant to rescue, which a norm or an activation
made finite again, are those of ``rules/nonfinite/overflow.py``. Outside of modules a guard that puts a number in place of each NaN is no failure
where the NaN was made of that element alone, as of 0/0. It is one where an infinity has gone into a sum over others: their values were
fine, and are gone with it.
"""

from collections.abc import Iterator

from dtypedoctor.diagnosis.ops import OpGraph, all_finite, ancestry, graph_of, has_nan
from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, Confidence, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import at_line, listed, short
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.rules import Statement, make_finding, make_finding_of
from dtypedoctor.rules.nonfinite.overflow import absorbed_evidence, absorbed_proof, is_rescue
from dtypedoctor.trace.events import Correction, Observed, Op
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import Absorbed

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
    do_this="Use bfloat16 in the place of float16, and remove what hides the overflow.",
    edits=("half-to-bfloat16", "finite-fill"),
)


def detect_rescues(trace: Trace) -> Iterator[Finding]:
    """Clamps and replacements that take inf or NaN out of the middle of a model."""
    for seen in trace.observed(Absorbed):
        if is_rescue(seen) and seen.what.rescued and not seen.what.born.rounded:
            yield _rescue(seen)
    last = {record.id: record for record in trace.all(Correction) if record.installed}
    for record in last.values():
        if record.rescued:
            statement = Statement(
                id="silent-rescue",
                severity=Severity.WARNING,
                proven_by="the correction counts the elements that it replaces",
                summary=f"The correction {record.id} replaced {record.rescued} elements that were not finite.",
                cause="What comes before the corrected operation is not finite already; the correction hides it.",
                evidence=(f"{record.rescued} elements rescued and {record.clamped} clamped in {record.hits} calls.",),
            )
            yield make_finding(statement, phase=None)


def _rescue(seen: Observed[Absorbed]) -> Finding:
    what, born = seen.what, seen.what.born
    statement = Statement(
        id="silent-rescue",
        severity=Severity.WARNING,
        proven_by=absorbed_proof(seen),
        summary=(
            f"An overflow is hidden in {short(seen.fqn)}: {what.op} replaces {_inf_or_nan(what.rescued)} with finite values in step "
            f"{seen.step}, so nothing raises and the loss looks normal."
        ),
        cause=(
            f"{born.op}{at_line(born.source)} overflows {born.dtype} and outputs inf. {what.op}{at_line(what.source)} then replaces inf and NaN "
            "with finite values. The affected tokens continue with replaced values, and the weights that caused the overflow get no "
            "gradient from them, so training cannot correct it."
        ),
        evidence=tuple(absorbed_evidence(seen)),
    )
    return make_finding_of(seen, statement, dtype=born.dtype, op=what.op, source=what.source)


def _inf_or_nan(count: int) -> str:
    return "1 inf or NaN element" if count == 1 else f"{count:,} inf or NaN elements"


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
    # How many infinite elements were made, or came in, before anything was NaN
    made = [tensor for op in (*found.asked, *found.computed) for tensor in op.outputs]
    tensors = {tensor.id: tensor for tensor in (*made, *(given for _, given in found.given))}
    infinities = sum(tensor.num_posinf + tensor.num_neginf for tensor in tensors.values())
    replaced = max(t.num_nan for t in op.inputs)
    if not 0 < infinities < replaced:
        return None
    sources = [source.source for source in (*found.asked, *found.computed) if source.source]
    lost = replaced - infinities
    count = "1 infinity" if infinities == 1 else f"{infinities:,} infinities"
    begin = f" made at {listed(list(dict.fromkeys(sources)))}" if sources else " in the input"
    statement = Statement(
        id="silent-rescue",
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        summary=f"{op.op} replaces {replaced:,} NaN that {count} made of a whole group: {lost:,} finite values are lost with them.",
        cause=(
            f"{count}{begin} entered a mean, a sum or a norm over other values, and all of its results are NaN; {op.op} at "
            f"{op.source} puts numbers in their place. No error is raised, and nothing is learned from these values. Give such elements "
            "a finite value, or leave them out before the mean."
        ),
        evidence=tuple(f"{maker.op}{at_line(maker.source)} makes NaN of infinities." for maker in found.nan_makers[:3]),
    )
    return make_finding(statement, phase=op.phase, step=op.step, op=op.op, source=op.source, dtype=op.outputs[0].dtype)


RULES = (
    Rule(name="rescues", priority=130, specs=(SPEC,), detect=detect_rescues),
    Rule(name="erased", priority=140, specs=(SPEC,), detect=detect_erased),
)
