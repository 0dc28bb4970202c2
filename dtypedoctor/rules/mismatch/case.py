"""One rejected operator: its operands, which of them is the odd one and why, and the finding that a verdict on it becomes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from dtypedoctor.diagnosis.ops import OpGraph, graph_of, overload_free
from dtypedoctor.diagnosis.rule import Finding, Link
from dtypedoctor.diagnosis.wording import (
    Complaint,
    at_line,
    complaint_of,
    how_the_run_ended,
    place,
    short,
    short_parameter,
)
from dtypedoctor.dtypes import DTYPES, WHOLE
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.rules.mismatch.dtype_origin import MERGES, Census, DtypeOrigin, Provenance, Reason
from dtypedoctor.trace.events import Op, Raised, TensorNote
from dtypedoctor.trace.model import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An operand of the rejected op that takes part in the mismatch; ``index`` counts over ``Op.inputs``."""

    index: int
    tensor: TensorNote
    origin: DtypeOrigin

    @property
    def dtype(self) -> str:
        """Its dtype."""
        return self.tensor.dtype


@dataclass(frozen=True)
class Case:
    """A rejected op.

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
        """The operands whose dtypes have to agree, each with where its dtype originates."""
        return tuple(
            Operand(index=i, tensor=t, origin=self.provenance.of(t, self.op))
            for i, t in enumerate(self.op.inputs)
            if self.meets(t)
        )

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that met, in the order of the operands."""
        return tuple(dict.fromkeys(t.dtype for t in self.op.inputs if self.meets(t)))

    @cached_property
    def whole(self) -> frozenset[str]:
        """The dtypes of whole numbers that the message names beside a floating-point one, where both are among the operands.

        Others are indices or masks, which have to be of another dtype, or packed weights.
        """
        named = set(self.complaint.dtypes) if self.complaint is not None else set()
        given = {t.dtype for t in self.op.inputs if t.origin != "parameter" or t.dtype in DTYPES} & named
        return frozenset(given & WHOLE) if not given.isdisjoint(DTYPES) else frozenset()

    def meets(self, tensor: TensorNote) -> bool:
        """Whether the dtype of an operand has to agree with those of others."""
        return tensor.dtype in DTYPES or (tensor.dtype in self.whole and tensor.origin != "parameter")

    @property
    def model_dtype(self) -> str | None:
        """The dtype of the model that the op runs in."""
        return self.census.dtype_of(self.op.root)

    @cached_property
    def rule(self) -> str | None:
        """The dtype that the operands should have: autocast's where it is among them, else the model's.

        What is written into a tensor should have the dtype of that tensor.
        """
        # An average, or the state of an optimizer; in a module the buffer that is written may be what is odd.
        if self.family in MERGES or (self.op.inplace and self.op.root < 0):
            return next(iter(self.dtypes), None)
        for wanted in (self.op.autocast, self.model_dtype):
            if wanted in self.dtypes:
                return wanted
        weights = (operand.dtype for operand in self.operands if operand.tensor.origin == "parameter")
        return next(weights, None) or next(reversed(self.dtypes), None)

    @cached_property
    def odd(self) -> Operand | None:
        """The operand that does not have the dtype it should have; of several the one whose origin says most."""
        deviating = [operand for operand in self.operands if operand.dtype != self.rule]
        telling = [operand for operand in deviating if operand.origin.reason not in _SAYS_LITTLE]
        return next(iter([*telling, *deviating]), None)

    def ran(self, how: str) -> bool:
        """Whether the op, replayed in the given way, ran."""
        replay = self.graph.replay(self.op, how)
        return replay is not None and not replay.note

    def raised_as(self, how: str) -> bool:
        """Whether the op, replayed in the given way, raised."""
        replay = self.graph.replay(self.op, how)
        return replay is not None and bool(replay.note)


_SAYS_LITTLE = frozenset({Reason.ELSEWHERE, Reason.CAST, Reason.AUTOCAST_LIST, Reason.FACTORY})


INTEGERS = frozenset({"uint8", "int8"})
"""The dtypes of packed weights."""


def case_of(trace: Trace) -> Case | None:
    """The op whose rejection ended the run; None where none did, where the op trace was not open there, or where dtypes are not what it rejects."""
    raised, op, graph = trace.last(Raised), trace.rejected, graph_of(trace)
    if raised is None or op is None or _is_rejected_all_the_same(op, graph):
        return None
    return Case(trace, raised, op, Provenance(graph, Census(trace)))


def _is_rejected_all_the_same(op: Op, graph: OpGraph) -> bool:
    """Whether the op raises the same with operands of one dtype: a shape, an index or a device is wrong, whatever the dtypes are.

    Packed weights have a wrong shape first of all, and no other dtype changes that.
    """
    replay = graph.replay(op, "equal-dtypes")
    if replay is None or not replay.note or op.error is None or any(tensor.dtype in INTEGERS for tensor in op.inputs):
        return False
    return replay.note.splitlines()[0] == op.error[: len(replay.note)]


def who_is_what(case: Case) -> str:
    """The dtype of every operand, the odd one first: ``Operand 2 is bfloat16, operands 0 and 1 are float16``."""
    dtypes = list(dict.fromkeys(operand.dtype for operand in case.operands))
    if case.odd is not None:
        dtypes.sort(key=case.odd.dtype.__ne__)
    said = []
    for dtype in dtypes:
        *first, last = [str(operand.index) for operand in case.operands if operand.dtype == dtype]
        said.append(f"operands {', '.join(first)} and {last} are {dtype}" if first else f"operand {last} is {dtype}")
    return ", ".join(said).capitalize()


_MODULE = "module."


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rule says about a rejected op.

    Attributes:
        id: id of the finding.
        fqn: the module that originates it.
        summary, cause, proven_by: see :class:`Finding`.
        evidence: sentences of the rule's own; what every rejection shows is added to them.
        blamed: the operand whose chain is the provenance; the odd one where left out.
        reason: the named reason in which the chain ends, where it is not the origin of the operand.
        unfit: remedies of this finding that do nothing about this op.
    """

    id: str
    fqn: str | None
    summary: str
    cause: str
    proven_by: str | None = None
    evidence: tuple[str, ...] = ()
    blamed: Operand | None = None
    reason: str | None = None
    unfit: frozenset[str] = frozenset()


def finding(case: Case, verdict: Verdict) -> Finding:
    """The verdict with everything that was measured about the rejected op."""
    op = case.op
    odd = verdict.blamed if verdict.blamed is not None else case.odd
    operands = ", ".join(
        t.dtype + (f" ({short_parameter(t.name)})" if t.name and t.origin != "input" else "")
        for t in op.inputs
        if case.meets(t) or t.origin == "parameter"
    )
    where = at_line(op.source)
    region = f" inside a {op.autocast} autocast region" if op.autocast else ", no autocast"
    statement = Statement(
        id=verdict.id,
        proven_by=verdict.proven_by,
        summary=verdict.summary,
        cause=verdict.cause,
        evidence=(
            f"{op_name(case)}{where} got {operands}{region}.",
            *verdict.evidence,
            *_experiments(case, odd),
            *how_the_run_ended(case.trace),
        ),
    )
    found = make_finding(
        statement,
        phase=op.phase,
        step=op.step,
        fqn=verdict.fqn,
        op=None if op.op.startswith(_MODULE) else op.op,
        dtype=odd.dtype if odd is not None else None,
        source=op.source,
        provenance=_chain(case, odd, verdict),
        met=_other_side(case, odd),
        cls=case.census.class_of(op.root, verdict.fqn or ""),
    )
    return replace(found, remedies=tuple(remedy for remedy in found.remedies if remedy not in verdict.unfit))


def op_name(case: Case) -> str:
    """The rejected op as a person would call it."""
    op = case.op.op
    return f"{op.removeprefix(_MODULE)}.forward" if op.startswith(_MODULE) else op


def described(origin: DtypeOrigin) -> str:
    """Where a dtype comes from, as the end of a sentence."""
    at = at_line(origin.op.source) if origin.op is not None and origin.op.source else ""
    name = origin.name or ""
    where = short(origin.fqn) if origin.fqn is not None else "the code outside of all modules"
    words = {
        Reason.NORM: f"the {origin.dtype} norm weight {name}",
        Reason.BUFFER: f"the {origin.dtype} buffer {name}",
        Reason.EMBEDDING: f"the {origin.dtype} embedding {name}",
        Reason.AUTOCAST_LIST: f"autocast, which casts the operands of the ops on its list{at}",
        Reason.QUANT_STATE: f"the dequantization of {name or 'a packed weight'} to {origin.quant_dtype}{at}",
        Reason.REINTERPRETED: f"{name or 'a packed weight'}, dequantized to {origin.quant_dtype} and read as {origin.dtype}{at}",
        Reason.COMPUTE_DTYPE: f"the compute dtype of the 4-bit layer {where}{at}",
        Reason.ADAPTER: f"the {origin.dtype} adapter {name}",
        Reason.MODULES_TO_SAVE: f"{name}, peft's trained copy, in {origin.dtype}",
        Reason.KEEP_IN_FP32: f"{name}, which the model's keep list leaves in {origin.dtype}",
        Reason.FSDP_OUTPUT: f"the FSDP output dtype of the shard unit {where}",
        Reason.ATTRIBUTE: f"the tensor {name}, a plain attribute in {origin.dtype}",
        Reason.CACHE: f"memory in {origin.dtype} that outlives the call{f' ({name})' if name else ''}",
        Reason.MODEL_INPUT: f"the model's input in {origin.dtype} ({name})",
        Reason.LOAD_DTYPE: f"{name}, which is {origin.dtype}",
        Reason.INPLACE: f"memory that {where} writes to{at}",
        Reason.CUSTOM_FUNCTION: f"a custom autograd function in {where}{at}",
        Reason.CAST: f"a cast to {origin.dtype} in {where}{at}",
        Reason.FACTORY: f"a tensor made in {origin.dtype} in {where}{at}",
        Reason.ELSEWHERE: f"a {origin.dtype} tensor{'' if origin.set_at else ' from outside of the call'}",
    }
    return words[origin.reason] + set_in_words(origin)


def set_in_words(origin: DtypeOrigin) -> str:
    """Which line of the program gave the tensor its dtype, in parentheses and with a space in front; empty where that is not known."""
    by = f"by {origin.set_by} " if origin.set_by else ""
    return f" (made {origin.dtype} {by}at {origin.set_at})" if origin.set_at is not None else ""


def settled_by(case: Case, operand: Operand | None) -> str | None:
    """The experiments which show that the dtype of ``operand`` made the op raise, and that its origin gave it that dtype, as a clause; else None."""
    if operand is None or not case.ran("equal-dtypes"):
        return None
    promoted = operand.origin.promoted
    if promoted is None:
        is_settled = operand.origin.reason is not Reason.ELSEWHERE or operand.origin.set_at is not None
    else:
        narrow = case.graph.replay(promoted, "narrowest-dtype")
        is_settled = narrow is not None and narrow.dtype is not None and narrow.dtype != operand.dtype
    return ran_in(case, case.rule) if is_settled else None


def ran_in(case: Case, dtype: str | None) -> str | None:
    """The experiment in which all operands of the op had ``dtype``, as a clause; None where it raised or was not made."""
    return (
        f"{op_name(case)} run again with all operands in {dtype} does not raise"
        if case.ran(f"all-as-{dtype}")
        else None
    )


def _experiments(case: Case, odd: Operand | None) -> Iterator[str]:
    """Which dtypes the rejected op would have taken, and which operator promoted the odd operand."""
    ways = [f"with all operands in {dtype}" for dtype in case.dtypes if case.ran(f"all-as-{dtype}")]
    if ways or case.ran("equal-dtypes"):
        how = " or ".join(ways or ["with all operands in one wider dtype"])
        yield f"Replayed alone on the same operands, the op runs {how}."
    yield from _narrowed(case, odd) if odd is not None else ()


def _narrowed(case: Case, odd: Operand) -> Iterator[str]:
    """What the operator that promoted the odd operand returns with operands of one dtype."""
    promoted = odd.origin.promoted
    narrow = case.graph.replay(promoted, "narrowest-dtype") if promoted is not None else None
    if promoted is not None and narrow is not None and narrow.dtype not in (None, "", odd.dtype):
        yield f"{promoted.op}{at_line(promoted.source)} returns {odd.dtype}; with all its operands in {narrow.dtype} it returns {narrow.dtype}."


def _chain(case: Case, odd: Operand | None, verdict: Verdict) -> tuple[Link, ...]:
    """From the rejected op back to the origin of the odd operand, or to the reason that the verdict gives instead."""
    op, dtype = case.op, odd.dtype if odd is not None else None
    first = Link(fqn=place(op), op=op.op, dtype_in=dtype, dtype_out=None, source=op.source)
    chain = (first, *(odd.origin.chain if odd is not None else ()))
    if verdict.reason is None:
        return chain
    return (*chain, Link(fqn=verdict.fqn, op=verdict.reason, dtype_in=None, dtype_out=dtype, source=op.source))


def _other_side(case: Case, odd: Operand | None) -> tuple[Link, ...]:
    """Where the dtype that the odd operand met came from: the chain of the operand of another dtype whose origin says most.

    Links that hand the dtype on as they got it are left out: nothing is to be found there.
    """
    others = [operand for operand in case.operands if odd is not None and operand.dtype != odd.dtype]
    known = [operand for operand in others if operand.origin.reason is not Reason.ELSEWHERE]
    chain: tuple[Link, ...] = next((operand.origin.chain for operand in [*known, *others]), ())
    return (*(link for link in chain[:-1] if link.dtype_in != link.dtype_out), *chain[-1:])
