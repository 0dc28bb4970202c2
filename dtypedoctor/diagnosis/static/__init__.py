"""What can be said of a model before it runs: from its files, or from what a worker has noted of its tensors."""

from collections.abc import Callable, Iterable

from dtypedoctor.diagnosis.finding import Finding, most_severe_first
from dtypedoctor.diagnosis.static.configured import check_configured
from dtypedoctor.diagnosis.static.kept import check_kept
from dtypedoctor.diagnosis.static.quantised import check_quantised
from dtypedoctor.diagnosis.static.rotary import check_rotary
from dtypedoctor.diagnosis.static.sharding import check_sharding
from dtypedoctor.diagnosis.static.subject import Subject
from dtypedoctor.diagnosis.static.trainable import check_trainable

__all__ = ["CHECKS", "preflight"]

CHECKS: dict[str, Callable[[Subject], Iterable[Finding]]] = {
    "configured": check_configured,
    "quantised": check_quantised,
    "trainable": check_trainable,
    "sharding": check_sharding,
    "rotary": check_rotary,
    "kept": check_kept,
}
"""Every static check by its name."""


def preflight(subject: Subject) -> tuple[Finding, ...]:
    """Everything that the checks see in ``subject``, what matters most first."""
    return most_severe_first(finding for check in CHECKS.values() for finding in check(subject))
