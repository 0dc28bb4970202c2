"""Rules: a module for each failure or family, and what all of them are written with, here and in other packages.

Any module here that has ``RULES`` is a part of the program; other packages name theirs in the group ``dtypedoctor.rules`` of entry points.
A rule states what it has found in a :class:`Statement`; the rest of a finding follows from its id and from where the failure was seen.
"""

from dataclasses import dataclass

from dtypedoctor.diagnosis import corrections_of_library, spec_of
from dtypedoctor.diagnosis.nonfinite_origin import Origin
from dtypedoctor.diagnosis.rule import (
    COMPILE_AND_LOAD,
    DTYPE_MISMATCH,
    LOSS_SCALING,
    NON_FINITE,
    SILENT,
    Confidence,
    Finding,
    FindingSpec,
    Link,
    Rule,
    Severity,
)
from dtypedoctor.diagnosis.wording import class_of, place
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.model import Trace

__all__ = ["COMPILE_AND_LOAD", "DTYPE_MISMATCH", "LOSS_SCALING", "NON_FINITE", "SILENT", "Confidence", "Finding", "FindingSpec", "Rule",
           "Severity", "Statement", "Trace", "located", "make_finding", "make_finding_of"]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A verdict without its coordinates; see :class:`~dtypedoctor.diagnosis.rule.Finding`.

    Who names the counterfactual in ``proven_by`` calls the finding proven; nothing else does.
    """

    id: str
    summary: str
    cause: str
    evidence: tuple[str, ...]
    confidence: Confidence = Confidence.LIKELY
    proven_by: str | None = None
    severity: Severity = Severity.ERROR


def make_finding(
    statement: Statement,
    *,
    phase: str | None,
    step: int | None = None,
    fqn: str | None = None,
    op: str | None = None,
    dtype: str | None = None,
    source: str | None = None,
    provenance: tuple[Link, ...] = (),
    met: tuple[Link, ...] = (),
    cls: str = "",
) -> Finding:
    """The statement with its coordinates, its remedies and its references.

    Corrections of the library in which ``source`` lies come first, then remedies for a module of class ``cls``. What is mere
    information needs no remedy.
    """
    spec = spec_of(statement.id)
    remedies = (*corrections_of_library(spec.id, source, cls), *spec.remedies_for(cls))
    return Finding(
        id=statement.id,
        severity=statement.severity,
        confidence=Confidence.PROVEN if statement.proven_by is not None else statement.confidence,
        proven_by=statement.proven_by,
        fqn=fqn,
        op=op,
        phase=phase,
        step=step,
        dtype=dtype,
        source=source,
        summary=_as_sentence(statement.summary),
        cause=statement.cause,
        evidence=statement.evidence,
        provenance=provenance,
        met=met,
        remedies=() if statement.severity is Severity.INFO else remedies,
        references=spec.references,
    )


def _as_sentence(summary: str) -> str:
    """With a capital where it begins with words of prose (`the outermost module`); names stay as they are."""
    return f"The {summary.removeprefix('the ')}" if summary.startswith("the ") else summary


def make_finding_of(
    seen: Observed[object], statement: Statement, *, dtype: str | None, op: str | None = None, source: str | None = None
) -> Finding:
    """The statement about what an instrument observed; the module is the one that the observation names."""
    return make_finding(statement, phase=seen.phase, step=seen.step, fqn=seen.fqn, op=op, dtype=dtype, source=source)


def make_finding_at(origin: Origin, statement: Statement) -> Finding:
    """The statement about the op at which a non-finite value came into being."""
    op = origin.op
    return make_finding(
        statement,
        phase=op.phase,
        step=op.step,
        fqn=place(op),
        op=op.op,
        dtype=origin.dtype,
        source=op.source,
        cls=class_of(origin.trace, op.fqn),
    )


located = make_finding
"""The name by which rules of other packages may know it."""
