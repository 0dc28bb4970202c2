"""Packed weights: used as if they were dense, dequantized to a dtype that does not fit, or read in another than written.

First whether a dequantized matrix is what its packed weight holds, then the verdicts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dtypedoctor.diagnosis.ops import graph_of, overload_free
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.diagnosis.wording import listed, module_of, place, short
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.rules.mismatch.case import INTEGERS, Case, Operand, Verdict, op_name, settled_by
from dtypedoctor.rules.mismatch.dtype_origin import (
    CASTS,
    CONVOLUTIONS,
    PRODUCTS,
    UNCOMPUTED,
    VIEWS,
    Census,
    DtypeOrigin,
    Provenance,
    Reason,
)
from dtypedoctor.trace.events import Op
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ComparedOperand, PackedBits, PackedWeight

MAX_BACK = 8
"""Views and casts between a product and the memory that it reads."""

_PACKED = (Reason.QUANT_STATE, Reason.REINTERPRETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """An operand that stands for a packed weight.

    Attributes:
        op: the op that uses it.
        origin: where the dtype comes from that it was read in, before it was cast.
        owner: dotted name of the module that holds the packed weight.
        name: name of the packed weight, where known.
        state_dtype: what the quantization state says.
        measured: the comparison of its values with those of the packed bytes; None where nothing was measured.
        misread: whether the bits of what was read are the weight, in the format that the quantization state says.
    """

    op: Op
    origin: DtypeOrigin
    owner: str
    name: str | None
    state_dtype: str | None
    measured: ComparedOperand | None
    misread: bool = False

    @property
    def called(self) -> str:
        """The weight's name, or that of the module that holds it."""
        return self.name or short(self.owner)

    @property
    def is_garbage(self) -> bool:
        """Whether what was multiplied is not the weight."""
        return self.measured.is_wrong if self.measured is not None else self.origin.reason is Reason.REINTERPRETED

    @property
    def evidence(self) -> tuple[str, ...]:
        """What was measured of it."""
        said = [f"The quantization state of {self.called} says {self.state_dtype}."]
        if self.measured is not None:
            error = self.measured.relative_error
            said.append(
                f"The matrix that was multiplied is {self.origin.dtype}; its relative error against the packed "
                f"bytes, decoded in float32, is {f'{error:.3g}' if error is not None else 'not finite'}."
            )
        if self.misread:
            said.append(f"The same bits read as {self.state_dtype} are the weight.")
        return tuple(said)


def unpacked(provenance: Provenance, op: Op, index: int, origin: DtypeOrigin) -> Unpacked | None:
    """The weight that operand ``index`` of ``op`` stands for; None where it is none."""
    compared = (seen.what for seen in provenance.graph.trace.observed(PackedWeight))
    measured = next((one for one in compared if (one.of, one.operand) == (op.n, index)), None)
    origin = provenance.before_casts(origin)
    misread = measured is not None and measured.is_wrong and _is_misread(provenance, op, index)
    if origin.reason in _PACKED:
        return _named(provenance, op, origin, origin.name, measured, misread=misread)
    if measured is not None and (misread or _may_be_filled_unseen(provenance, op, index, origin, measured)):
        return _named(provenance, op, origin, measured.weight, measured, misread=misread)
    return None


def unpacked_of_bits(provenance: Provenance, op: Op, bits: PackedBits) -> Unpacked | None:
    """The weight whose bits ``op`` was seen to read in another dtype; None where they are only moved and reach no product.

    Whatever stands between (a join, a scale), the product that its result reaches is the op that uses it.
    """
    used = [op, *provenance.graph.downstream(op, MAX_BACK)]
    product = next((user for user in used if overload_free(user.op) in PRODUCTS), None)
    is_cast = any(out.dtype != bits.dtype for out in op.outputs)
    if product is None and not is_cast:
        return None
    origin = provenance.before_casts(provenance.of(op.inputs[bits.operand], op))
    name = origin.name if origin.reason in _PACKED else bits.weight
    return _named(provenance, product or op, origin, name, bits, misread=True)


def _named(provenance: Provenance, op: Op, origin: DtypeOrigin, name: str | None, measured: ComparedOperand | None,
           *, misread: bool) -> Unpacked:  # fmt: skip
    note = provenance.census.note(op.root, name) if name else None
    seen = measured.quant_dtype if measured is not None else None
    stated = note.quant.get("dtype") if note is not None and note.quant else seen
    return Unpacked(
        op=op,
        origin=origin,
        owner=module_of(name) if name else origin.fqn or "",
        name=name,
        state_dtype=stated or origin.quant_dtype,
        measured=measured,
        misread=misread,
    )


def _may_be_filled_unseen(
    provenance: Provenance, op: Op, index: int, origin: DtypeOrigin, measured: PackedWeight
) -> bool:
    """Whether an operand's memory may have been filled by a kernel that no mode sees (ctypes, Triton).

    New memory that nobody was seen to write to is; memory from before the window only where its dtype is not the state's,
    because a dense matrix of the same shape may come from there too. What holds the weight's values is the weight, and what was
    computed from such memory is another matrix.
    """
    if not measured.is_wrong:
        return True
    first = provenance.graph.producer(op.inputs[index])
    while first is not None and first.inputs and overload_free(first.op) in CASTS | VIEWS:
        first = provenance.graph.producer(first.inputs[0])
    if first is not None and overload_free(first.op) not in UNCOMPUTED:
        return False
    if origin.reason is Reason.FACTORY:
        return origin.op is not None and overload_free(origin.op.op) in UNCOMPUTED
    return origin.reason is Reason.ELSEWHERE and measured.dtype != measured.quant_dtype


def _is_misread(provenance: Provenance, op: Op, index: int) -> bool:
    """Whether memory that was read in another dtype, by the product or by a cast before it, holds the weight in the state's own."""
    misread = {(seen.what.of, seen.what.operand) for seen in provenance.graph.trace.observed(PackedBits)}
    for _ in range(MAX_BACK):
        if (op.n, index) in misread:
            return True
        maker = provenance.graph.producer(op.inputs[index])
        if maker is None or not maker.inputs or overload_free(maker.op) not in CASTS | VIEWS:
            return False
        op, index = maker, 0
    return False


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
            f"{packed.name} holds {packed.dtype} storage{f' ({kind})' if kind else ''} that only the quantized layer's own "
            f"forward can unpack. Code that takes the layer's `weight` and multiplies with it (nn.MultiheadAttention's fast "
            "path, a merged projection, a patched forward) gets the bytes."
        ),
        evidence=(f"{packed.name} has the shape {packed.shape} of the storage, not that of the layer's weight.",),
        reason=f"{Reason.QUANT_STATE}: {packed.name}",
    )


def stale_buffer(case: Case) -> Verdict | None:
    """A product rejects a weight that was dequantized to one dtype and is read from memory typed as another."""
    for operand in case.operands:
        found = unpacked(case.provenance, case.op, operand.index, operand.origin)
        if found is not None and found.is_garbage and found.state_dtype not in (None, found.origin.dtype):
            return _garbage(found, operand)
    return None


def dequantized_to_another_dtype(case: Case) -> Verdict | None:
    """A product rejects a weight that is what its quantization state says, which is not what the activations are."""
    compared = (seen.what for seen in case.trace.observed(PackedWeight) if seen.what.of == case.op.n)
    right = {one.operand for one in compared if not one.is_wrong}
    odd = next(
        (
            operand
            for operand in case.operands
            if operand.dtype != case.rule and (operand.origin.reason is Reason.QUANT_STATE or operand.index in right)
        ),
        None,
    )
    found = unpacked(case.provenance, case.op, odd.index, odd.origin) if odd is not None else None
    if odd is None or found is None:
        return None
    if found.is_garbage:
        return _garbage(found, odd)
    hidden = (
        f" The {case.op.autocast} autocast region hides that wherever a product is on its list, but {op_name(case)} writes "
        "to memory that exists already, where autocast casts nothing."
    )
    return Verdict(
        id="quant-state-dtype",
        fqn=found.owner,
        summary=f"{found.called} dequantizes to {odd.dtype}, the activations are {case.rule}.",
        cause=(
            f"The quantization state of the packed weight says {odd.dtype}, so that is what it is dequantized to; nothing casts "
            f"it to the {case.rule} of what it is multiplied with.{hidden if case.op.autocast == case.rule else ''}"
        ),
        proven_by=settled_by(case, odd),
        evidence=found.evidence,
        blamed=odd,
        unfit=frozenset({"dequant-float32-kernel"}),  # the values are right
    )


def _garbage(found: Unpacked, blamed: Operand | None = None) -> Verdict:
    """What was multiplied is not the weight: read in another dtype than it was written in, or written by a kernel of another format."""
    state, read = found.state_dtype, found.origin.dtype
    if state != read:
        name = "stale-dequant-buffer"
        summary = f"{found.called} is dequantized to {state} and read as {read}: its values are garbage."
        cause = (
            f"The kernel that dequantizes is chosen by the quantization state ({state}), the memory that it writes to was made for "
            f"another dtype ({read}), by an earlier call or model. Nothing is converted: {state} bit patterns are read as {read} numbers. "
            "Casting the result converts wrong values; autocast does so in silence."
        )
    else:
        name = "quant-state-dtype"
        summary = f"{found.called} is dequantized by a kernel of another format than its {state} state."
        cause = (
            f"The quantization state says {state}, and so does the memory, but the kernel that filled it writes another format: a choice "
            f"between two 16-bit kernels has none for {state}. Part of the memory is not even written to."
        )
    return Verdict(
        id=name,
        fqn=found.owner,
        summary=summary,
        cause=cause,
        proven_by="the same packed weight, dequantized in float32 from its state, is not the matrix that was multiplied",
        evidence=found.evidence,
        blamed=blamed,
    )


def silently_wrong_weights(trace: Trace) -> Iterator[Finding]:
    """Products that ran on something else than the packed weight that they were meant to use."""
    found = sorted(_wrong(trace), key=lambda one: one.op.n)
    if not found:
        return
    first, verdict = found[0], _garbage(found[0])
    owners = list(dict.fromkeys(one.owner for one in found))
    others = (f"As wrong: the packed weights of {listed(owners[1:])}.",) if len(owners) > 1 else ()
    statement = Statement(
        id=verdict.id,
        proven_by=verdict.proven_by,
        summary=verdict.summary,
        cause=verdict.cause,
        evidence=(*verdict.evidence, *others, "No operation has complained, and everything is finite."),
    )
    yield make_finding(
        statement,
        phase=first.op.phase,
        step=first.op.step,
        fqn=first.owner,
        op=first.op.op,
        dtype=first.origin.dtype,
        source=first.op.source,
        provenance=first.origin.chain,
    )


def _wrong(trace: Trace) -> Iterator[Unpacked]:
    """One weight of each product: the one whose bits were seen on the way to it, else the one that its operand should have been."""
    compared = (seen.what for seen in trace.observed(PackedWeight))
    suspects: list[ComparedOperand] = [
        *(seen.what for seen in trace.observed(PackedBits)),
        *(one for one in compared if one.is_wrong),
    ]
    if not suspects:
        return
    graph = graph_of(trace)
    provenance = Provenance(graph, Census(trace))

    by_number = {op.n: op for op in graph.ops if op.error is None}
    told = set()
    for seen in suspects:
        if (op := by_number.get(seen.of)) is None:
            continue
        if isinstance(seen, PackedBits):
            found = unpacked_of_bits(provenance, op, seen)
        else:
            found = unpacked(provenance, op, seen.operand, provenance.of(op.inputs[seen.operand], op))
        if found is not None and found.is_garbage and found.op.n not in told:
            told.add(found.op.n)
            yield found
