"""Reads traces and says what went wrong. No torch.

What rules find is put in order; findings in a damaged trace are not called proven, findings of a process without optimizer steps
count calls, and ablations that tell causes apart are offered: no autocast, attention in steps, nothing compiled, a loss scale of 1.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from dtypedoctor.diagnosis.checkpoint import Subject
from dtypedoctor.diagnosis.registry import rules, spec_of
from dtypedoctor.diagnosis.rule import Confidence, Detector, Finding, Severity, most_severe_first
from dtypedoctor.trace.events import ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import AutocastRegion, CompileCounts


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """Everything that the rules find in ``trace``, the root cause before its consequences; they are asked once."""
    return trace.once(_diagnosed)


def _diagnosed(trace: Trace) -> tuple[Finding, ...]:
    found = [finding for rule in rules() if rule.detect for finding in findings_of(rule.detect, trace)]
    ordered = tuple(with_tie_breakers(finding, trace) for finding in most_severe_first(found))
    if trace.by_call:
        ordered = tuple(map(in_calls, ordered))
    return tuple(map(cap_confidence, ordered)) if trace.damage else ordered


def preflight(subject: Subject) -> tuple[Finding, ...]:
    """Everything that the rules find in ``subject``, what matters most first."""
    return most_severe_first(finding for rule in rules() if rule.inspect for finding in rule.inspect(subject))


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


def cap_confidence(finding: Finding) -> Finding:
    """The finding, no more than likely."""
    if finding.confidence is not Confidence.PROVEN:
        return finding
    return replace(finding, confidence=Confidence.LIKELY, proven_by=None, evidence=(*finding.evidence, _WHY))


def in_calls(finding: Finding) -> Finding:
    """The finding with the number of the outermost module call where detectors say that of a step; the first is in step 1 anyhow."""
    if finding.step is None or finding.step == 1:
        return finding
    step = re.compile(rf"\bstep {finding.step}\b")

    def reworded(text: str) -> str:
        return step.sub(f"call {finding.step}", text, count=1)  # what follows may be quoted from a message

    return replace(
        finding,
        call=finding.step,
        summary=reworded(finding.summary),
        cause=reworded(finding.cause),
        evidence=tuple(map(reworded, finding.evidence)),
    )


FUSED = re.compile(
    r"(?<!_math)_(flash|efficient|cudnn)_attention|flash_attn|flex_attention|scaled_dot_product_attention\b"
)
"""Kernels and functions that compute attention in one piece."""


def with_tie_breakers(finding: Finding, trace: Trace) -> Finding:
    """The finding, with the ablations that would settle something about it behind the fixes."""
    if finding.severity is Severity.INFO:
        return finding
    wanted = spec_of(finding.id).ablations
    offered = [name for name, tells in TIE_BREAKERS.items() if name in wanted and tells(finding, trace)]
    return replace(finding, remedies=tuple(dict.fromkeys((*finding.remedies, *offered))))


def _autocast(finding: Finding, trace: Trace) -> bool:
    """Without regions that cast, values have the dtypes that the program itself gave them."""
    dtypes = {o.what.dtype for o in trace.observed(AutocastRegion) if o.what.enabled}
    return finding.dtype in dtypes if spec_of(finding.id).fits_wider_dtype else bool(dtypes)


def _compiled(finding: Finding, trace: Trace) -> bool:
    """With every operator on record nothing is compiled, so a finding from such a trace is not the compiler's."""
    compiled = any(seen.what.unique_graphs for seen in trace.observed(CompileCounts))
    return compiled and finding.severity is Severity.ERROR


TIE_BREAKERS: Mapping[str, Callable[[Finding, Trace], bool]] = {
    "autocast-off": _autocast,
    # the operators inside of a fused kernel are not seen, and it computes otherwise than they would
    "eager-attention": lambda finding, trace: FUSED.search(finding.op or "") is not None,
    "compile-off": _compiled,
    # a gradient leaves the range by itself, or because the loss was multiplied
    "loss-scale-one": lambda finding, trace: bool(trace.all(ScalerState)),
}
"""By ablation, whether the trace has what it takes away; which findings it settles something about, their specs say."""
