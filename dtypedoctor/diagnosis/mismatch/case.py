"""One refused operation with everything that is known about it: which operand is the odd one, and why."""

from dataclasses import dataclass
from functools import cached_property

from dtypedoctor.diagnosis.mismatch.birth import Birth, Reason
from dtypedoctor.diagnosis.mismatch.census import Census
from dtypedoctor.diagnosis.mismatch.kinds import MERGES, WRITES_AT_INDEX
from dtypedoctor.diagnosis.mismatch.messages import Complaint, complaint_of
from dtypedoctor.diagnosis.mismatch.provenance import Provenance
from dtypedoctor.diagnosis.ops import OpGraph, graph_of, overload_free
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Op, Raised, Replay, TensorNote
from dtypedoctor.trace.reader import Trace

__all__ = ["Case", "Operand", "case_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A floating-point operand of the refused op; ``index`` counts over ``Op.inputs``."""

    index: int
    tensor: TensorNote
    birth: Birth

    @property
    def dtype(self) -> str:
        """Its dtype."""
        return self.tensor.dtype


@dataclass(frozen=True)
class Case:
    """A refused op.

    Attributes:
        trace: the trace it is in.
        raised: the exception that it became.
        op: the op.
        provenance: the op trace and the models.
    """

    trace: Trace
    raised: Raised
    op: Op
    provenance: Provenance

    @property
    def graph(self) -> OpGraph:
        """The op trace."""
        return self.provenance.graph

    @property
    def census(self) -> Census:
        """What is known of the models."""
        return self.provenance.census

    @property
    def family(self) -> str:
        """Name of the op without namespace and overload."""
        return overload_free(self.op.op)

    @cached_property
    def complaint(self) -> Complaint | None:
        """What the message says."""
        return complaint_of(self.raised.message)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The floating-point operands, each with where its dtype was born."""
        return tuple(
            Operand(index=i, tensor=t, birth=self.provenance.of(t, self.op))
            for i, t in enumerate(self.op.inputs)
            if t.dtype in DTYPES
        )

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The floating-point dtypes that met, in the order of the operands."""
        return tuple(dict.fromkeys(t.dtype for t in self.op.inputs if t.dtype in DTYPES))

    @property
    def model_dtype(self) -> str | None:
        """The dtype of the model that the op runs in."""
        return self.census.dtype_of(self.op.root)

    @cached_property
    def rule(self) -> str | None:
        """The dtype that the operands should have: autocast's where it is among them, else the model's.

        What is written into a tensor should have the dtype of that tensor.
        """
        if self.family in MERGES:
            return self.dtypes[0] if self.dtypes else None
        if self.op.autocast in self.dtypes:
            return self.op.autocast
        model = self.model_dtype
        if model in self.dtypes:
            return model
        weight = next((o.dtype for o in self.operands if o.tensor.origin == "parameter"), None)
        return weight or (self.dtypes[-1] if self.dtypes else None)

    @cached_property
    def odd(self) -> Operand | None:
        """The operand that does not have the dtype it should have; of several the one whose birth says most."""
        deviating = [operand for operand in self.operands if operand.dtype != self.rule]
        telling = [operand for operand in deviating if operand.birth.reason not in _SAYS_LITTLE]
        return next(iter([*telling, *deviating]), None)

    @property
    def writes_at_index(self) -> bool:
        """Whether the op writes a source into a destination of the same dtype."""
        return self.family in WRITES_AT_INDEX

    def replay(self, how: str) -> Replay | None:
        """A replay of the op that was made in the given way."""
        return self.graph.replay(self.op, how)

    def ran(self, how: str) -> bool:
        """Whether the op, replayed in the given way, ran."""
        replay = self.replay(how)
        return replay is not None and not replay.note

    def ran_with(self, operand: Operand) -> bool:
        """Whether the op ran when ``operand`` alone was cast to the dtype of the others, or all to the one they should have."""
        return self.ran(f"operand-{operand.index}-as-{self.rule}") or self.ran(f"all-as-{self.rule}")


_SAYS_LITTLE = frozenset({Reason.ELSEWHERE, Reason.CAST, Reason.AUTOCAST_LIST, Reason.FACTORY})


def case_of(trace: Trace) -> Case | None:
    """The op whose refusal ended the run; None where none did, or the op trace was not open there."""
    raised = trace.last(Raised)
    if raised is None:
        return None
    graph = graph_of(trace)
    op = next((o for o in reversed(graph.ops) if o.error is not None and o.error in raised.message), None)
    return Case(trace, raised, op, Provenance(graph, Census(trace))) if op is not None else None
