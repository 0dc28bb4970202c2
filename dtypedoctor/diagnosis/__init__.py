"""Reads traces and says what went wrong. No torch."""

from collections.abc import Callable, Iterable

from dtypedoctor.diagnosis.compilation import detect_compilation
from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.mismatch.detect import detect_mismatch
from dtypedoctor.diagnosis.nonfinite import detect_nonfinite
from dtypedoctor.diagnosis.streams import detect_stale_streams
from dtypedoctor.trace.reader import Trace

Detector = Callable[[Trace], Iterable[Finding]]

DETECTORS: dict[str, Detector] = {
    "mismatch": detect_mismatch,
    "non-finite": detect_nonfinite,
    "compilation": detect_compilation,
    "streams": detect_stale_streams,
}
"""Every detector by the name of its family."""

_RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """Everything that the detectors see in ``trace``, the root cause before its consequences."""
    found = [finding for detector in DETECTORS.values() for finding in detector(trace)]
    return tuple(sorted(found, key=lambda f: _RANK[f.severity]))
