"""What can be said of a model before it runs: from its files, or from what a worker has noted of its tensors."""

from dtypedoctor.diagnosis.finding import Finding, most_severe_first
from dtypedoctor.diagnosis.registry import rules
from dtypedoctor.diagnosis.static.subject import Subject

__all__ = ["preflight"]


def preflight(subject: Subject) -> tuple[Finding, ...]:
    """Everything that the rules find in ``subject``, what matters most first."""
    return most_severe_first(finding for rule in rules() if rule.inspect for finding in rule.inspect(subject))
