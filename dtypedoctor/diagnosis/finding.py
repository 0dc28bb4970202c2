"""What a detector says."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Confidence", "Finding", "Link", "Severity", "most_severe_first"]


class Severity(StrEnum):
    """How much a finding matters, the worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Confidence(StrEnum):
    """How sure a finding is. ``PROVEN`` is said only where a counterfactual run or replay settled it."""

    PROVEN = "proven"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link of a provenance chain, from the failing op back to where a dtype originates."""

    fqn: str | None
    op: str
    dtype_in: str | None
    dtype_out: str | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosed failure: what, where it originates, why, how sure, and what fixes it.

    Attributes:
        id: kebab-case id, the same string in YAML, JSON, docs and file names.
        fqn: dotted name of the module that originates the failure, or None where no module does.
        op: operator, e.g. ``aten.mul.Tensor``.
        phase: ``static``, ``forward``, ``backward``, ``recompute``, ``optimizer``, ``generate`` or ``compile``.
        step: training step, counted from 1; where there is a ``call``, the same number.
        source: ``file.py:line`` of the user's or library's code.
        summary: the headline, one sentence.
        cause: why it happens, one paragraph.
        evidence: measurements, one sentence each.
        provenance: where the dtype that does not fit came from, from the failing op back.
        met: where the dtype that it met came from, from the other operand back to its origin.
        remedies: ids of remedies to try, best first.
        references: public tickets of the same failure.
        proven_by: the counterfactual that settled it, as a clause; None where the finding is not proven.
        rank: the process that it was seen on first; None where there is one process only.
        call: number of the outermost module call, only where the process made no optimizer step and it is not the first.
        consequence_of: id of the finding that this one is the surfacing of; None where it stands for itself.
    """

    id: str
    severity: Severity
    confidence: Confidence
    fqn: str | None = None
    op: str | None = None
    phase: str | None = None
    step: int | None = None
    dtype: str | None = None
    source: str | None = None
    summary: str
    cause: str
    evidence: tuple[str, ...] = ()
    provenance: tuple[Link, ...] = ()
    remedies: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    rank: int | None = None
    consequence_of: str | None = None
    met: tuple[Link, ...] = ()
    call: int | None = None
    proven_by: str | None = None


def most_severe_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings by severity; those of one severity keep their order."""
    severities = list(Severity)
    return tuple(sorted(findings, key=lambda finding: severities.index(finding.severity)))
