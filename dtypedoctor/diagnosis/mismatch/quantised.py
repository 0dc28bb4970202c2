"""Packed weights: used as if they were dense, dequantised to a dtype that does not fit, or read in another than written."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.mismatch.birth import Reason
from dtypedoctor.diagnosis.mismatch.case import Case, Operand
from dtypedoctor.diagnosis.mismatch.census import Census
from dtypedoctor.diagnosis.mismatch.kinds import CONVOLUTIONS, PRODUCTS
from dtypedoctor.diagnosis.mismatch.provenance import Provenance
from dtypedoctor.diagnosis.mismatch.report import Verdict, said, settled_by
from dtypedoctor.diagnosis.mismatch.unpacked import Unpacked, is_wrong
from dtypedoctor.diagnosis.ops import graph_of
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import listed, place, short
from dtypedoctor.trace.events import Op
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.models import ComparedOperand, PackedBits, PackedWeight

__all__ = ["dequantised_to_another_dtype", "packed_weight_used_as_dense", "silently_wrong_weights", "stale_buffer"]

INTEGERS = frozenset({"uint8", "int8"})


def packed_weight_used_as_dense(case: Case) -> Verdict | None:
    """A product whose operand is the packed storage itself."""
    if case.family not in PRODUCTS | CONVOLUTIONS:
        return None
    integers = [t for t in case.op.inputs if t.dtype in INTEGERS]
    packed = next((found for t in integers if (found := case.provenance.stored(t, case.op)) is not None), None)
    if packed is None or packed.name is None:
        return None
    note = case.census.note(case.op.root, packed.name)
    kind = note.quant.get("kind") if note is not None and note.quant else None
    return Verdict(
        id="packed-weight-used-as-dense",
        fqn=place(case.op),
        summary=f"{short(place(case.op))} multiplies with the packed bytes of {packed.name} as if they were its weight.",
        cause=(
            f"{packed.name} holds {packed.dtype} storage{f' ({kind})' if kind else ''} that only the quantised layer's own "
            f"forward can unpack. Code that takes the layer's `weight` and multiplies with it (nn.MultiheadAttention's fast "
            "path, a merged projection, a patched forward) gets the bytes."
        ),
        evidence=(f"{packed.name} has the shape {packed.shape} of the storage, not that of the layer's weight.",),
        reason=f"{Reason.QUANT_STATE}: {packed.name}",
    )


def stale_buffer(case: Case) -> Verdict | None:
    """A product refuses a weight that was dequantised to one dtype and is read from memory typed as another."""
    for operand in case.operands:
        found = Unpacked.of(case.provenance, case.op, operand.index, operand.birth)
        read = found.birth.dtype if found is not None else None
        if found is not None and read is not None and found.is_garbage and found.state_dtype not in (None, read):
            return Verdict(
                id="stale-dequant-buffer",
                fqn=found.owner,
                summary=_stale_summary(found, read),
                cause=_STALE.format(state=found.state_dtype, read=read),
                proven_by=_GARBAGE,
                evidence=found.evidence,
                blamed=operand,
            )
    return None


def dequantised_to_another_dtype(case: Case) -> Verdict | None:
    """A product refuses a weight that is what its quantisation state says, which is not what the activations are."""
    odd = _dequantised_operand(case)
    if odd is None:
        return None
    found = Unpacked.of(case.provenance, case.op, odd.index, odd.birth)
    if found is None:
        return None
    if found.is_garbage:
        return Verdict(
            id="quant-state-dtype",
            fqn=found.owner,
            summary=_kernel_summary(found),
            cause=_KERNEL.format(state=found.state_dtype),
            proven_by=_GARBAGE,
            evidence=found.evidence,
            blamed=odd,
        )
    hidden = case.op.autocast == case.rule
    return Verdict(
        id="quant-state-dtype",
        fqn=found.owner,
        summary=f"{found.name or short(found.owner)} dequantises to {odd.dtype}, the activations are {case.rule}.",
        cause=(
            f"The quantisation state of the packed weight says {odd.dtype}, so that is what it is dequantised to; nothing casts "
            f"it to the {case.rule} of what it is multiplied with."
            + (
                f" The {case.op.autocast} autocast region hides that wherever a product is on its list, but {said(case)} writes "
                "to memory that exists already, where autocast casts nothing."
                if hidden
                else ""
            )
        ),
        proven_by=settled_by(case, odd),
        evidence=found.evidence,
        blamed=odd,
        unfit=frozenset({"dequant-float32-kernel"}),  # the values are right
    )


def silently_wrong_weights(trace: Trace) -> Iterator[Finding]:
    """Products that ran on something else than the packed weight that they were meant to use."""
    found = sorted(_wrong(trace), key=lambda one: one.op.n)
    if found:
        yield _silent(found)


def _wrong(trace: Trace) -> Iterator[Unpacked]:
    """One weight of each product: the one whose bits were seen on the way to it, else the one that its operand should have been."""
    compared = (seen.what for seen in trace.observed(PackedWeight))
    suspects: list[ComparedOperand] = [seen.what for seen in trace.observed(PackedBits)]
    suspects += filter(is_wrong, compared)
    if not suspects:
        return
    graph = graph_of(trace)
    provenance = Provenance(graph, Census(trace))
    by_number = {op.n: op for op in graph.ops if op.error is None}
    told = set()
    for seen in suspects:
        op = by_number.get(seen.of)
        unpacked = _unpacked(provenance, op, seen) if op is not None else None
        if unpacked is not None and unpacked.is_garbage and unpacked.op.n not in told:
            told.add(unpacked.op.n)
            yield unpacked


def _unpacked(provenance: Provenance, op: Op, seen: ComparedOperand) -> Unpacked | None:
    if isinstance(seen, PackedBits):
        return Unpacked.of_bits(provenance, op, seen)
    return Unpacked.of(provenance, op, seen.operand, provenance.of(op.inputs[seen.operand], op))


def _silent(found: list[Unpacked]) -> Finding:
    first = found[0]
    read = first.birth.dtype
    stale = first.state_dtype != read
    name = "stale-dequant-buffer" if stale else "quant-state-dtype"
    owners = list(dict.fromkeys(one.owner for one in found))
    others = (f"As wrong: the packed weights of {listed(owners[1:])}.",) if len(owners) > 1 else ()
    statement = Statement(
        id=name,
        proven_by=_GARBAGE,
        summary=_stale_summary(first, read) if stale else _kernel_summary(first),
        cause=_STALE.format(state=first.state_dtype, read=read) if stale else _KERNEL.format(state=first.state_dtype),
        evidence=(*first.evidence, *others, "No operation has complained, and everything is finite."),
    )
    return located(
        statement,
        phase=first.op.phase,
        step=first.op.step,
        fqn=first.owner,
        op=first.op.op,
        dtype=read,
        source=first.op.source,
        provenance=first.birth.chain,
    )


_GARBAGE = "the same packed weight, dequantized in float32 from its state, is not the matrix that was multiplied"
_STALE = (
    "The kernel that dequantises is chosen by the quantisation state ({state}), the memory that it writes to was made for "
    "another dtype ({read}), by an earlier call or model. Nothing is converted: {state} bit patterns are read as {read} numbers. "
    "Casting the result converts wrong values; autocast does so in silence."
)
_KERNEL = (
    "The quantisation state says {state}, and so does the memory, but the kernel that filled it writes another format: a choice "
    "between two 16-bit kernels has none for {state}. Part of the memory is not even written to."
)


def _stale_summary(found: Unpacked, read: str) -> str:
    return f"{found.name or short(found.owner)} is dequantised to {found.state_dtype} and read as {read}: its values are garbage."


def _kernel_summary(found: Unpacked) -> str:
    return f"{found.name or short(found.owner)} is dequantised by a kernel of another format than its {found.state_dtype} state."


def _dequantised_operand(case: Case) -> Operand | None:
    """The odd operand that goes back to a packed weight, if one does."""
    compared = (o.what for o in case.trace.observed(PackedWeight) if o.what.of == case.op.n)
    seen = {one.operand for one in compared if not is_wrong(one)}
    return next(
        (
            o
            for o in case.operands
            if o.dtype != case.rule and (o.birth.reason is Reason.QUANT_STATE or o.index in seen)
        ),
        None,
    )
