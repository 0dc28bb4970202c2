"""Reads traces and says what went wrong. No torch."""

from dtypedoctor.diagnosis.damaged import doubted, findings_of
from dtypedoctor.diagnosis.finding import Finding, most_severe_first
from dtypedoctor.diagnosis.registry import rules
from dtypedoctor.diagnosis.steps import in_calls
from dtypedoctor.diagnosis.tie_breakers import with_tie_breakers
from dtypedoctor.trace.reader import Trace


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """Everything that the rules find in ``trace``, the root cause before its consequences; they are asked once."""
    return trace.once(_diagnosed)


def _diagnosed(trace: Trace) -> tuple[Finding, ...]:
    found = [finding for rule in rules() if rule.detect for finding in findings_of(rule.detect, trace)]
    ordered = tuple(with_tie_breakers(finding, trace) for finding in most_severe_first(found))
    if trace.by_call:
        ordered = tuple(map(in_calls, ordered))
    return tuple(map(doubted, ordered)) if trace.damage else ordered
