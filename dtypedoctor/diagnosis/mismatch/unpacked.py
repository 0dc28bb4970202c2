"""Operands that are, or are meant to be, a packed weight made dense again."""

from dataclasses import dataclass

from dtypedoctor.diagnosis.mismatch.birth import Birth, Reason
from dtypedoctor.diagnosis.mismatch.census import owner_of
from dtypedoctor.diagnosis.mismatch.kinds import CASTS, PRODUCTS, UNCOMPUTED, VIEWS
from dtypedoctor.diagnosis.mismatch.provenance import Provenance
from dtypedoctor.diagnosis.ops import overload_free
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.trace.events import Op
from dtypedoctor.trace.records.models import ComparedOperand, PackedBits, PackedWeight

__all__ = ["Unpacked", "is_wrong"]

MAX_BACK = 8
"""Views and casts between a product and the memory that it reads."""

_PACKED = (Reason.QUANT_STATE, Reason.REINTERPRETED)

GARBAGE = 0.1
"""Relative error above which a matrix is not the packed weight; rounding to bfloat16 makes 0.002."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """An operand that stands for a packed weight.

    Attributes:
        op: the op that uses it.
        birth: where the dtype comes from that it was read in, before it was cast.
        owner: dotted name of the module that holds the packed weight.
        name: name of the packed weight, where known.
        state_dtype: what the quantisation state says.
        measured: whether its values were compared with those of the packed bytes.
        error: the relative error found; None where it is not finite, or nothing was measured.
        misread: whether the bits of what was read are the weight, in the format that the quantisation state says.
    """

    op: Op
    birth: Birth
    owner: str
    name: str | None
    state_dtype: str | None
    measured: bool
    error: float | None
    misread: bool = False

    @classmethod
    def of(cls, provenance: Provenance, op: Op, index: int, birth: Birth) -> "Unpacked | None":
        """The weight that operand ``index`` of ``op`` stands for; None where it is none."""
        compared = (seen.what for seen in provenance.graph.trace.observed(PackedWeight))
        measured = next((one for one in compared if (one.of, one.operand) == (op.n, index)), None)
        birth = provenance.before_casts(birth)
        goes_back = birth.reason in _PACKED
        misread = measured is not None and is_wrong(measured) and _is_misread(provenance, op, index)
        if not goes_back and (
            measured is None or not (misread or _may_be_filled_unseen(provenance, op, index, birth, measured))
        ):
            return None
        name = birth.name if goes_back or measured is None else measured.weight
        return cls._named(provenance, op, birth, name, measured, misread)

    @classmethod
    def of_bits(cls, provenance: Provenance, op: Op, bits: PackedBits) -> "Unpacked | None":
        """The weight whose bits ``op`` was seen to read in another dtype; None where they are only moved and reach no product.

        Whatever stands between (a join, a scale), the product that its result reaches is the op that uses it.
        """
        used = [op, *provenance.graph.downstream(op, MAX_BACK)]
        product = next((user for user in used if overload_free(user.op) in PRODUCTS), None)
        is_cast = any(out.dtype != bits.dtype for out in op.outputs)
        if product is None and not is_cast:
            return None
        birth = provenance.before_casts(provenance.of(op.inputs[bits.operand], op))
        name = birth.name if birth.reason in _PACKED else bits.weight
        return cls._named(provenance, product or op, birth, name, bits, True)

    @classmethod
    def _named(cls, provenance: Provenance, op: Op, birth: Birth, name: str | None,
               measured: ComparedOperand | None, misread: bool) -> "Unpacked":  # fmt: skip
        note = provenance.census.note(op.root, name) if name else None
        seen = measured.quant_dtype if measured is not None else None
        stated = note.quant.get("dtype") if note is not None and note.quant else seen
        return cls(
            op=op,
            birth=birth,
            owner=owner_of(name) if name else birth.fqn or "",
            name=name,
            state_dtype=stated or birth.quant_dtype,
            measured=measured is not None,
            error=measured.relative_error if measured is not None else None,
            misread=misread,
        )

    @property
    def is_garbage(self) -> bool:
        """Whether what was multiplied is not the weight."""
        wrong = self.measured and (self.error is None or self.error > GARBAGE)
        return wrong or (self.birth.reason is Reason.REINTERPRETED and not self.measured)

    @property
    def evidence(self) -> tuple[str, ...]:
        """What was measured of it."""
        said = [f"The quantisation state of {self.name or short(self.owner)} says {self.state_dtype}."]
        if self.measured:
            size = f"{self.error:.3g}" if self.error is not None else "not finite"
            said.append(
                f"The matrix that was multiplied is {self.birth.dtype}; its relative error against the packed "
                f"bytes, decoded in float32, is {size}."
            )
        if self.misread:
            said.append(f"The same bits read as {self.state_dtype} are the weight.")
        return tuple(said)


def is_wrong(compared: ComparedOperand) -> bool:
    """Whether a comparison found something else than the packed weight."""
    return compared.relative_error is None or compared.relative_error > GARBAGE


def _may_be_filled_unseen(provenance: Provenance, op: Op, index: int, birth: Birth, measured: PackedWeight) -> bool:
    """Whether an operand's memory may have been filled by a kernel that no mode sees (ctypes, Triton).

    New memory that nobody was seen to write to is; memory from before the window only where its dtype is not the state's,
    because a dense matrix of the same shape may come from there too. What holds the weight's values is the weight, and what was
    computed from such memory is another matrix.
    """
    if not is_wrong(measured):
        return True
    first = _before_views(provenance, op, index)
    if first is not None and overload_free(first.op) not in UNCOMPUTED:
        return False
    if birth.reason is Reason.FACTORY:
        return birth.op is not None and overload_free(birth.op.op) in UNCOMPUTED
    if birth.reason is Reason.ELSEWHERE:
        return measured.dtype != measured.quant_dtype
    return False


def _before_views(provenance: Provenance, op: Op, index: int) -> Op | None:
    """The op that made an operand, views and casts left out; None where it came from outside of the window."""
    maker = provenance.graph.producer(op.inputs[index])
    while maker is not None and maker.inputs and overload_free(maker.op) in CASTS | VIEWS:
        maker = provenance.graph.producer(maker.inputs[0])
    return maker


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
