"""Reads traces and says what went wrong. No torch."""

from collections.abc import Callable, Iterable

from dtypedoctor.diagnosis.compilation import detect_compilation
from dtypedoctor.diagnosis.damaged import doubted, findings_of
from dtypedoctor.diagnosis.finding import Finding, most_severe_first
from dtypedoctor.diagnosis.loading import detect_loading
from dtypedoctor.diagnosis.mismatch.detect import detect_mismatch
from dtypedoctor.diagnosis.nonfinite import detect_nonfinite
from dtypedoctor.diagnosis.scaling import detect_exhausted_scale, detect_scaling
from dtypedoctor.diagnosis.silent.absorbed import detect_rescues
from dtypedoctor.diagnosis.silent.agreement import detect_gap, detect_missing_patches
from dtypedoctor.diagnosis.silent.erased import detect_erased
from dtypedoctor.diagnosis.silent.forward import detect_integer_casts, detect_router_flips, detect_stale_cache
from dtypedoctor.diagnosis.silent.positional import detect_rotary_tables, detect_rounded_positions
from dtypedoctor.diagnosis.silent.training import detect_partial_stall, detect_stall, detect_underflow
from dtypedoctor.diagnosis.steps import in_calls
from dtypedoctor.diagnosis.streams import detect_stale_streams
from dtypedoctor.diagnosis.tie_breakers import with_tie_breakers
from dtypedoctor.trace.reader import Trace

Detector = Callable[[Trace], Iterable[Finding]]

DETECTORS: dict[str, Detector] = {
    "mismatch": detect_mismatch,
    "scaling": detect_scaling,
    "non-finite": detect_nonfinite,
    "loss-scale": detect_exhausted_scale,
    "compilation": detect_compilation,
    "streams": detect_stale_streams,
    "missing-patches": detect_missing_patches,
    "stale-autocast-cache": detect_stale_cache,
    "integer-casts": detect_integer_casts,
    "rescues": detect_rescues,
    "erased": detect_erased,
    "gradient-underflow": detect_underflow,
    "update-stall": detect_stall,
    "router-flips": detect_router_flips,
    "logprob-gap": detect_gap,
    "rounded-positions": detect_rounded_positions,
    "partial-stall": detect_partial_stall,
    "rotary-tables": detect_rotary_tables,
    "loading": detect_loading,
}
"""Every detector by the name of its family; of two findings of the same severity the one of the earlier family comes first."""


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """Everything that the detectors see in ``trace``, the root cause before its consequences."""
    found = [finding for detector in DETECTORS.values() for finding in findings_of(detector, trace)]
    ordered = tuple(with_tie_breakers(finding, trace) for finding in most_severe_first(found))
    if trace.by_call:
        ordered = tuple(map(in_calls, ordered))
    return tuple(map(doubted, ordered)) if trace.damage else ordered
