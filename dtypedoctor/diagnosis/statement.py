"""What a detector has to say by itself; the rest of a finding follows from its id and from where the failure was seen."""

from dataclasses import dataclass

from dtypedoctor.diagnosis.finding import Confidence, Finding, Link, Severity
from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.trace.events import Observed

__all__ = ["Statement", "found_in", "located"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A verdict without its coordinates; see :class:`~dtypedoctor.diagnosis.finding.Finding`.

    Who names the counterfactual in ``proven_by`` calls the finding proven; nothing else does.
    """

    id: str
    summary: str
    cause: str
    evidence: tuple[str, ...]
    confidence: Confidence = Confidence.LIKELY
    proven_by: str | None = None
    severity: Severity = Severity.ERROR


def located(
    said: Statement,
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
    """The statement with its coordinates, its remedies (those for a module of class ``cls`` first) and its references.

    What is mere information needs no remedy.
    """
    spec = spec_of(said.id)
    return Finding(
        id=said.id,
        severity=said.severity,
        confidence=Confidence.PROVEN if said.proven_by is not None else said.confidence,
        proven_by=said.proven_by,
        fqn=fqn,
        op=op,
        phase=phase,
        step=step,
        dtype=dtype,
        source=source,
        summary=_as_sentence(said.summary),
        cause=said.cause,
        evidence=said.evidence,
        provenance=provenance,
        met=met,
        remedies=() if said.severity is Severity.INFO else spec.remedies_for(cls),
        references=spec.references,
    )


def _as_sentence(summary: str) -> str:
    """With a capital where it begins with words of prose (`the outermost module`); names stay as they are."""
    return f"The {summary.removeprefix('the ')}" if summary.startswith("the ") else summary


def found_in(
    seen: Observed[object], said: Statement, *, dtype: str | None, op: str | None = None, source: str | None = None
) -> Finding:
    """The statement about what an instrument observed; the module is the one that the observation names."""
    return located(said, phase=seen.phase, step=seen.step, fqn=seen.fqn, op=op, dtype=dtype, source=source)
