"""Offers to run again under another condition where that tells two causes apart: no autocast, attention in steps, nothing compiled,
a loss scale of 1."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.trace.events import ScalerState
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.autocast import AutocastRegion
from dtypedoctor.trace.records.compiling import CompileCounts

__all__ = ["TIE_BREAKERS", "with_tie_breakers"]

FUSED = re.compile(
    r"(?<!_math)_(flash|efficient|cudnn)_attention|flash_attn|flex_attention|scaled_dot_product_attention\b"
)
"""Kernels and functions that compute attention in one piece."""


def with_tie_breakers(finding: Finding, trace: Trace) -> Finding:
    """The finding, proposing those conditions that would settle something about it, behind what may cure it."""
    if finding.severity is Severity.INFO:
        return finding
    offered = [
        name for name in TIE_BREAKERS if name in spec_of(finding.id).ablations and TIE_BREAKERS[name](finding, trace)
    ]
    return replace(finding, remedies=tuple(dict.fromkeys((*finding.remedies, *offered))))


def _autocast(finding: Finding, trace: Trace) -> bool:
    """Without regions that cast, values have the dtypes that the program itself gave them."""
    dtypes = {o.what.dtype for o in trace.observed(AutocastRegion) if o.what.enabled}
    return finding.dtype in dtypes if spec_of(finding.id).fits_wider_dtype else bool(dtypes)


def _fused_attention(finding: Finding, trace: Trace) -> bool:
    """A fused kernel shows nothing of what is inside it, and has arithmetic of its own."""
    return finding.op is not None and FUSED.search(finding.op) is not None


def _compiled(finding: Finding, trace: Trace) -> bool:
    """With every operator on record nothing is compiled, so a finding from such a trace is not the compiler's."""
    compiled = any(seen.what.unique_graphs for seen in trace.observed(CompileCounts))
    return compiled and finding.severity is Severity.ERROR


def _scaled(finding: Finding, trace: Trace) -> bool:
    """A gradient leaves the range by itself, or because the loss was multiplied."""
    return bool(trace.all(ScalerState))


TIE_BREAKERS: Mapping[str, Callable[[Finding, Trace], bool]] = {
    "autocast-off": _autocast,
    "eager-attention": _fused_attention,
    "compile-off": _compiled,
    "loss-scale-one": _scaled,
}
"""By ablation, whether the trace has what it takes away; which findings it settles something about, their specs say."""
