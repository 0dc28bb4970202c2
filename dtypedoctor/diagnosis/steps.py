"""Findings of a process that made no optimizer step: what their numbers count is calls, and nothing calls them steps."""

import re
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding

__all__ = ["in_calls"]


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
