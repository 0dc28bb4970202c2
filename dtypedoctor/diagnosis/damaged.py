"""Diagnosing a trace of which a part is lost: what is left is looked at, and nothing in it is called proven."""

from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.rule import Detector
from dtypedoctor.trace.reader import Trace

__all__ = ["doubted", "findings_of"]

_STUMBLES = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, StopIteration)
"""What a detector may raise that looks for a record which is lost."""

_WHY = "A part of the trace is lost, so what was found in the rest is not called proven."


def findings_of(detector: Detector, trace: Trace) -> tuple[Finding, ...]:
    """What the detector sees; nothing where it fails over what a damaged trace lacks."""
    if not trace.damage:
        return tuple(detector(trace))
    try:
        return tuple(detector(trace))
    except _STUMBLES:
        return ()


def doubted(finding: Finding) -> Finding:
    """The finding, no more than likely."""
    if finding.confidence is not Confidence.PROVEN:
        return finding
    return replace(finding, confidence=Confidence.LIKELY, proven_by=None, evidence=(*finding.evidence, _WHY))
