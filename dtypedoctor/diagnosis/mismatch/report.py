"""Puts what is known of a refused operation into a finding."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtypedoctor.diagnosis.finding import Finding, Link
from dtypedoctor.diagnosis.mismatch.birth import Birth, Reason
from dtypedoctor.diagnosis.mismatch.case import Case, Operand
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import how_the_run_ended, place, short, short_parameter
from dtypedoctor.dtypes import DTYPES

__all__ = ["Verdict", "described", "finding", "is_settled", "met", "ran_in", "said", "settled_by"]

_MODULE = "module."


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rule says about a refused op.

    Attributes:
        id: id of the finding.
        fqn: the module that originates it.
        summary, cause, proven_by: see :class:`Finding`.
        evidence: sentences of the rule's own; what every refusal shows is added to them.
        blamed: the operand whose chain is the provenance; the odd one where left out.
        reason: the named reason in which the chain ends, where it is not the birth of the operand.
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
    """The verdict with everything that was measured about the refused op."""
    op = case.op
    odd = verdict.blamed if verdict.blamed is not None else case.odd
    statement = Statement(
        id=verdict.id,
        proven_by=verdict.proven_by,
        summary=verdict.summary,
        cause=verdict.cause,
        evidence=(met(case), *verdict.evidence, *_experiments(case, odd), *how_the_run_ended(case.trace)),
    )
    found = located(
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


def met(case: Case) -> str:
    """Which operands the op got, as a sentence."""
    operands = ", ".join(
        t.dtype + (f" ({short_parameter(t.name)})" if t.name and t.origin != "input" else "")
        for t in case.op.inputs
        if t.dtype in DTYPES or t.origin == "parameter"
    )
    where = f" at {case.op.source}" if case.op.source else ""
    region = f" inside a {case.op.autocast} autocast region" if case.op.autocast else ", no autocast"
    return f"{said(case)}{where} got {operands}{region}."


def said(case: Case) -> str:
    """The refused op as a person would call it."""
    op = case.op.op
    return f"{op.removeprefix(_MODULE)}.forward" if op.startswith(_MODULE) else op


def described(birth: Birth) -> str:
    """Where a dtype comes from, as the end of a sentence."""
    at = f" at {birth.op.source}" if birth.op is not None and birth.op.source else ""
    name = birth.name or ""
    where = short(birth.fqn) if birth.fqn is not None else "the code outside of all modules"
    words = {
        Reason.NORM: f"the {birth.dtype} norm weight {name}",
        Reason.BUFFER: f"the {birth.dtype} buffer {name}",
        Reason.EMBEDDING: f"the {birth.dtype} embedding {name}",
        Reason.AUTOCAST_LIST: f"autocast, which casts the operands of the ops on its list{at}",
        Reason.QUANT_STATE: f"the dequantisation of {name or 'a packed weight'} to {birth.quant_dtype}{at}",
        Reason.REINTERPRETED: f"{name or 'a packed weight'}, dequantised to {birth.quant_dtype} and read as {birth.dtype}{at}",
        Reason.COMPUTE_DTYPE: f"the compute dtype of the 4-bit layer {where}{at}",
        Reason.ADAPTER: f"the {birth.dtype} adapter {name}",
        Reason.MODULES_TO_SAVE: f"{name}, peft's trained copy, in {birth.dtype}",
        Reason.KEEP_IN_FP32: f"{name}, which the model's keep list leaves in {birth.dtype}",
        Reason.FSDP_OUTPUT: f"the FSDP output dtype of the shard unit {where}",
        Reason.ATTRIBUTE: f"the tensor {name}, a plain attribute in {birth.dtype}",
        Reason.CACHE: f"memory in {birth.dtype} that outlives the call{f' ({name})' if name else ''}",
        Reason.MODEL_INPUT: f"the model's input in {birth.dtype} ({name})",
        Reason.LOAD_DTYPE: f"{name}, which is {birth.dtype}",
        Reason.INPLACE: f"memory that {where} writes to{at}",
        Reason.CUSTOM_FUNCTION: f"a custom autograd function in {where}{at}",
        Reason.CAST: f"a cast to {birth.dtype} in {where}{at}",
        Reason.FACTORY: f"a tensor made in {birth.dtype} in {where}{at}",
        Reason.ELSEWHERE: f"a {birth.dtype} tensor from outside of the call",
    }
    return words[birth.reason]


def is_settled(case: Case, operand: Operand | None) -> bool:
    """Whether experiments show that the dtype of ``operand`` alone made the op refuse, and that its birth gave it that dtype."""
    if operand is None or not case.ran("equal-dtypes") or not case.ran_with(operand):
        return False
    promoted = operand.birth.promoted
    if promoted is None:
        return operand.birth.reason is not Reason.ELSEWHERE
    narrow = case.graph.replay(promoted, "narrowest-dtype")
    return narrow is not None and narrow.dtype is not None and narrow.dtype != operand.dtype


def settled_by(case: Case, operand: Operand | None) -> str | None:
    """The experiment of :func:`is_settled` as a clause; None where nothing is settled."""
    if operand is None or not is_settled(case, operand):
        return None
    return f"{said(case)} run again with its {operand.dtype} operand alone cast to {case.rule} does not raise"


def ran_in(case: Case, dtype: str | None) -> str | None:
    """The experiment in which all operands of the op had ``dtype``, as a clause; None where it raised or was not made."""
    return (
        f"{said(case)} run again with all operands in {dtype} does not raise" if case.ran(f"all-as-{dtype}") else None
    )


def _experiments(case: Case, odd: Operand | None) -> tuple[str, ...]:
    ways = tuple(_ways_that_ran(case, odd))
    found = [f"Replayed alone on the same operands, the op runs {' or '.join(ways)}."] if ways else []
    promoted = odd.birth.promoted if odd is not None else None
    narrow = case.graph.replay(promoted, "narrowest-dtype") if promoted is not None else None
    if promoted is not None and narrow is not None and narrow.dtype and odd is not None and narrow.dtype != odd.dtype:
        found.append(
            f"{promoted.op} at {promoted.source} returns {odd.dtype}; with all its operands in {narrow.dtype} it returns "
            f"{narrow.dtype}."
        )
    return tuple(found)


def _ways_that_ran(case: Case, odd: Operand | None) -> Iterator[str]:
    """Which dtypes the refused op would have taken, each told once: casting the only odd operand makes all of them agree."""
    alone = odd is not None and case.ran(f"operand-{odd.index}-as-{case.rule}")
    for dtype in case.dtypes:
        if case.ran(f"all-as-{dtype}"):
            only = f" (only operand {odd.index} changes)" if odd is not None and alone and dtype == case.rule else ""
            yield f"with all operands in {dtype}{only}"
    if alone and odd is not None and not case.ran(f"all-as-{case.rule}"):
        yield f"with operand {odd.index} alone cast to {case.rule}"
    if case.ran("equal-dtypes") and not any(case.ran(f"all-as-{dtype}") for dtype in case.dtypes):
        yield "with all operands in one wider dtype"


def _chain(case: Case, odd: Operand | None, verdict: Verdict) -> tuple[Link, ...]:
    """From the refused op back to the birth of the odd operand, or to the reason that the verdict gives instead."""
    op, dtype = case.op, odd.dtype if odd is not None else None
    first = Link(fqn=place(op), op=op.op, dtype_in=dtype, dtype_out=None, source=op.source)
    chain = (first, *(odd.birth.chain if odd is not None else ()))
    if verdict.reason is None:
        return chain
    return (*chain, Link(fqn=verdict.fqn, op=verdict.reason, dtype_in=None, dtype_out=dtype, source=op.source))


def _other_side(case: Case, odd: Operand | None) -> tuple[Link, ...]:
    """Where the dtype that the odd operand met came from: the chain of the operand of another dtype whose birth says most.

    Links that hand the dtype on as they got it are left out: nothing is to be found there.
    """
    others = [operand for operand in case.operands if odd is not None and operand.dtype != odd.dtype]
    known = [operand for operand in others if operand.birth.reason is not Reason.ELSEWHERE]
    chain: tuple[Link, ...] = next((operand.birth.chain for operand in [*known, *others]), ())
    return (*(link for link in chain[:-1] if link.dtype_in != link.dtype_out), *chain[-1:])
