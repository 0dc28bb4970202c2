"""Mismatches that torch detects itself and names in its message: recomputed activations, FSDP units, a custom backward without its region."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dtypedoctor.diagnosis.ops import OpGraph, graph_of
from dtypedoctor.diagnosis.rule import Finding, Link
from dtypedoctor.diagnosis.wording import (
    complaint_of,
    dtype_named,
    how_the_run_ended,
    listed,
    raising_line,
    rejection_in,
    short,
)
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.rules.mismatch.case import Case, Verdict, op_name, ran_in
from dtypedoctor.trace.events import Observed, Op, Raised
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.models import ShardCall, ShardUnit

_METADATA = re.compile(
    r"saved metadata: .*?'dtype': torch\.(\w+).*?recomputed metadata: .*?'dtype': torch\.(\w+)", re.DOTALL
)


def recomputed_outside_of_the_region(case: Case) -> Verdict | None:
    """An op rejects in a recomputation what it took in the forward pass, where an autocast region was open."""
    op = case.op
    if op.phase != "recompute" or op.autocast is not None:
        return None
    twins = (
        one for one in case.graph.ops if (one.root, one.fqn, one.op, one.phase) == (op.root, op.fqn, op.op, "forward")
    )
    first = next((twin for twin in twins if twin.autocast is not None), None)
    if first is None:
        return None
    unit = case.raised.modules[0] if case.raised.modules else op.fqn
    return Verdict(
        id="recompute-dtype-mismatch",
        fqn=unit,
        summary=f"{short(unit)} is recomputed without the {first.autocast} autocast region of its forward pass.",
        cause=(
            f"The forward pass ran inside a {first.autocast} autocast region. The recomputation in the backward pass enters "
            f"none, so {op_name(case)} gets {' and '.join(case.dtypes)} as they are."
        ),
        proven_by=ran_in(case, first.autocast),
        evidence=(f"In the forward pass {first.op} got {', '.join(t.dtype for t in first.inputs)}, cast by autocast.",),
    )


def recomputed_with_other_dtypes(trace: Trace) -> Iterator[Finding]:
    """torch's own check has found that a recomputation saved tensors of other dtypes than the forward pass."""
    raised = rejection_in(trace)
    complaint = complaint_of(raised.message) if raised is not None else None
    if raised is None or complaint is None or complaint.family != "recompute":
        return
    changed = next((pair for pair in _METADATA.findall(raised.message) if pair[0] != pair[1]), None)
    if changed is None:
        return
    saved, again = (dtype_named(word) for word in changed)
    unit = raised.modules[0] if raised.modules else None
    pair = _first_difference(graph_of(trace), unit)
    before, after = pair or (None, None)
    evidence = [f"The forward pass saved {saved} where the recomputation has {again}."]
    proven = None
    if before is not None and after is not None:
        dtypes = [op.outputs[0].dtype for op in (before, after)]
        evidence.append(
            f"The first op that differs is {after.op} at {after.source}: {dtypes[0]} in the forward pass, {dtypes[1]} in the recomputation."
        )
        proven = f"{after.op} ran twice, in the forward pass and in the recomputation, and returned two dtypes"
    statement = Statement(
        id="recompute-dtype-mismatch",
        proven_by=proven,
        summary=f"{short(unit)} is recomputed in {again} where its forward pass was in {saved}.",
        cause=(
            "Checkpointing runs the module a second time in the backward pass and expects the same tensors. Something that "
            "decides dtypes (the default dtype, an autocast region, a cast of the inputs) was different by then."
        ),
        evidence=(*evidence, *how_the_run_ended(trace)),
    )
    yield make_finding(
        statement,
        phase="recompute",
        step=raised.step,
        fqn=unit,
        op=after.op if after is not None else None,
        dtype=again,
        source=after.source if after is not None else None,
        provenance=tuple(map(_link, pair or ())),
    )


def _first_difference(graph: OpGraph, unit: str | None) -> tuple[Op, Op] | None:
    """The first op of the recomputation whose results have other dtypes than those of the same op in the forward pass."""
    if unit is None:
        return None
    for before, after in zip(_ops_of(graph, unit, "forward"), _ops_of(graph, unit, "recompute"), strict=False):
        if before.op != after.op:
            return None
        if [t.dtype for t in before.outputs] != [t.dtype for t in after.outputs]:
            return before, after
    return None


def _ops_of(graph: OpGraph, unit: str, phase: str) -> list[Op]:
    """The ops of a module, and of those inside it, in one phase."""
    return [op for op in graph.ops if op.phase == phase and f"{op.fqn}.".startswith(f"{unit}.")]


def _link(op: Op) -> Link:
    return Link(
        fqn=op.fqn,
        op=op.op,
        dtype_in=op.inputs[0].dtype if op.inputs else None,
        dtype_out=op.outputs[0].dtype if op.outputs else None,
        source=op.source,
    )


FSDP2 = "fully_shard"


def mixed_shard_units(trace: Trace) -> Iterator[Finding]:
    """FSDP has rejected a unit because its parameters (or gradients) do not have one dtype, or is going to.

    ``fully_shard`` takes any parameters, and rejects them when the unit is first called: what it was given is enough to tell.
    """
    raised = rejection_in(trace)
    complaint = complaint_of(raised.message) if raised is not None else None
    if complaint is not None and complaint.family == "shards":
        # Known by its name where it has been called, else from the call that made it
        units: Sequence[Observed[ShardUnit | ShardCall]] = (*trace.observed(ShardUnit), *trace.observed(ShardCall))
        yield _of_a_unit(trace, _mixed(units), raised)
    elif not trace.observed(ShardUnit):  # no unit has been called yet
        call = _mixed([seen for seen in trace.observed(ShardCall) if seen.what.api == FSDP2])
        if call is not None:
            yield _of_a_unit(trace, call, None)


def _mixed(units: Sequence[Observed[ShardUnit | ShardCall]]) -> Observed[ShardUnit | ShardCall] | None:
    return next((unit for unit in units if len(_dtypes(unit.what)) > 1), None)


def _dtypes(unit: ShardUnit | ShardCall) -> Mapping[str, list[str]]:
    """Names of parameters by dtype, of those that have to agree: FSDP2 asks it of trainable ones only."""
    is_first = isinstance(unit, ShardCall) and unit.api != FSDP2
    return unit.dtypes if is_first or unit.trainable is None else unit.trainable


def _of_a_unit(trace: Trace, unit: Observed[ShardUnit | ShardCall] | None, raised: Raised | None) -> Finding:
    dtypes = _dtypes(unit.what) if unit is not None else {}
    fqn = unit.fqn if unit is not None else None
    if fqn is None and raised is not None and raised.modules:
        fqn = raised.modules[-1]
    cls = unit.what.cls if unit is not None and isinstance(unit.what, ShardCall) else "of FSDP"
    yet = ("The unit has not been called: FSDP2 raises at the first forward pass.",) if raised is None else ()
    statement = Statement(
        id="fsdp-mixed-dtypes",
        summary=f"The shard unit {short(fqn) if fqn is not None else cls} holds parameters of {' and '.join(dtypes) or 'more than one dtype'}.",
        cause=(
            "FSDP puts the parameters of a unit into one flat buffer, which has one dtype. Adapters, norms kept in float32 and "
            "4-bit storage (whose storage dtype counts) are the usual exceptions inside a unit of half-precision weights."
        ),
        evidence=(
            *(f"{dtype}: {listed(sorted(names))}." for dtype, names in dtypes.items()),
            *how_the_run_ended(trace),
            *yet,
        ),
    )
    calls = (seen.what for seen in trace.observed(ShardCall))
    sources = (call.source for call in calls if _dtypes(call) and _same(call, dtypes))
    return make_finding(
        statement,
        phase=raised.phase if raised is not None else "static",
        step=raised.step if raised is not None else None,
        fqn=fqn,
        dtype=min(dtypes, key=lambda dtype: len(dtypes[dtype])) if dtypes else None,
        source=next(sources, None),
    )


def _same(call: ShardCall, dtypes: Mapping[str, list[str]]) -> bool:
    """Whether a call made the unit with these parameters; its names are relative to that unit."""
    made = _dtypes(call)
    return made.keys() == dtypes.keys() and all(
        any(name == own or name.endswith(f".{own}") for name in dtypes[dtype]) for dtype in made for own in made[dtype]
    )


MISSING = re.compile(r"'(?P<function>\w+?)(?:Backward)?' object has no attribute '_(?:fwd_used_autocast|dtype)'")
"""What ``custom_bwd`` says of a context that ``custom_fwd`` has not written to."""


def context_without_region(trace: Trace) -> Iterator[Finding]:
    """``custom_bwd`` without a ``custom_fwd`` that could have left it anything: none at all, or one without ``ctx``."""
    raised = rejection_in(trace)
    found = MISSING.search(raised.message) if raised is not None and raised.type == "AttributeError" else None
    if raised is None or found is None:
        return
    function = found["function"]
    statement = Statement(
        id="custom-function-autocast",
        summary=f"The backward of {function} asks for the autocast region of its forward, which was not noted.",
        cause=(
            "custom_fwd leaves the region's dtype in the ctx that forward gets as its first argument, and custom_bwd reads it "
            f"there. The forward of {function} is not decorated, or has no ctx because the function defines setup_context."
        ),
        evidence=how_the_run_ended(trace),
    )
    finding = make_finding(statement, phase=raised.phase, step=raised.step, source=raising_line(raised))
    yield replace(finding, references=("https://github.com/pytorch/pytorch/issues/132388", *finding.references))
