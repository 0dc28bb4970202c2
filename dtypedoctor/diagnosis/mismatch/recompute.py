"""Activation checkpointing: a recomputation whose dtypes are not those of the forward pass."""

import re
from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding, Link
from dtypedoctor.diagnosis.mismatch.case import Case
from dtypedoctor.diagnosis.mismatch.messages import complaint_of, dtype_named
from dtypedoctor.diagnosis.mismatch.report import Verdict, ran_in, said
from dtypedoctor.diagnosis.ops import OpGraph, graph_of
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import how_the_run_ended, short
from dtypedoctor.trace.events import Op, Raised
from dtypedoctor.trace.reader import Trace

__all__ = ["recomputed_outside_of_the_region", "recomputed_with_other_dtypes"]

_METADATA = re.compile(
    r"saved metadata: .*?'dtype': torch\.(\w+).*?recomputed metadata: .*?'dtype': torch\.(\w+)", re.DOTALL
)


def recomputed_outside_of_the_region(case: Case) -> Verdict | None:
    """An op refuses in a recomputation what it took in the forward pass, where an autocast region was open."""
    if case.op.phase != "recompute" or case.op.autocast is not None:
        return None
    twin = next((op for op in case.graph.ops if op.fqn == case.op.fqn and op.root == case.op.root and op.op == case.op.op
                 and op.phase == "forward" and op.autocast is not None), None)  # fmt: skip
    if twin is None:
        return None
    unit = case.raised.modules[0] if case.raised.modules else case.op.fqn
    return Verdict(
        id="recompute-dtype-mismatch",
        fqn=unit,
        summary=f"{short(unit)} is recomputed without the {twin.autocast} autocast region of its forward pass.",
        cause=(
            f"The forward pass ran inside a {twin.autocast} autocast region. Whoever recomputes it in the backward pass enters "
            f"none, so {said(case)} gets {' and '.join(case.dtypes)} as they are."
        ),
        proven_by=ran_in(case, twin.autocast),
        evidence=(f"In the forward pass {twin.op} got {', '.join(t.dtype for t in twin.inputs)}, cast by autocast.",),
    )


def recomputed_with_other_dtypes(trace: Trace) -> Iterator[Finding]:
    """torch's own check has found that a recomputation saved tensors of other dtypes than the forward pass."""
    raised = trace.last(Raised)
    complaint = complaint_of(raised.message) if raised is not None else None
    if raised is None or complaint is None or complaint.family != "recompute":
        return
    changed = next(((saved, again) for saved, again in _METADATA.findall(raised.message) if saved != again), None)
    if changed is None:
        return
    saved, again = (dtype_named(word) for word in changed)
    unit = raised.modules[0] if raised.modules else None
    split = _first_difference(graph_of(trace), unit)
    evidence = [f"The forward pass saved {saved} where the recomputation has {again}."]
    if split is not None:
        evidence.append(
            f"The first op that differs is {split[1].op} at {split[1].source}: {split[0].outputs[0].dtype} in the forward pass, "
            f"{split[1].outputs[0].dtype} in the recomputation."
        )
    statement = Statement(
        id="recompute-dtype-mismatch",
        proven_by=(
            f"{split[1].op} ran twice, in the forward pass and in the recomputation, and returned two dtypes"
            if split is not None
            else None
        ),
        summary=f"{short(unit)} is recomputed in {again} where its forward pass was in {saved}.",
        cause=(
            "Checkpointing runs the module a second time in the backward pass and expects the same tensors. Something that "
            "decides dtypes (the default dtype, an autocast region, a cast of the inputs) was different by then."
        ),
        evidence=(*evidence, *how_the_run_ended(trace)),
    )
    yield located(
        statement,
        phase="recompute",
        step=raised.step,
        fqn=unit,
        op=split[1].op if split is not None else None,
        dtype=again,
        source=split[1].source if split is not None else None,
        provenance=(_link(split[0]), _link(split[1])) if split is not None else (),
    )


def _first_difference(graph: OpGraph, unit: str | None) -> tuple[Op, Op] | None:
    """The first op of the recomputation whose results have other dtypes than its twin's in the forward pass."""
    if unit is None:
        return None
    inside = [op for op in graph.ops if op.fqn == unit or op.fqn.startswith(f"{unit}.")]
    again = [op for op in inside if op.phase == "recompute"]
    first = [op for op in inside if op.phase == "forward"]
    for before, after in zip(first, again, strict=False):
        if before.op != after.op:
            return None
        if [t.dtype for t in before.outputs] != [t.dtype for t in after.outputs]:
            return before, after
    return None


def _link(op: Op) -> Link:
    return Link(
        fqn=op.fqn,
        op=op.op,
        dtype_in=op.inputs[0].dtype if op.inputs else None,
        dtype_out=op.outputs[0].dtype if op.outputs else None,
        source=op.source,
    )
