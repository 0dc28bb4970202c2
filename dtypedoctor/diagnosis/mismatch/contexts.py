"""Custom autograd functions whose backward looks for an autocast region that their forward has not noted."""

import re
from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import how_the_run_ended, raising_line
from dtypedoctor.trace.events import Raised
from dtypedoctor.trace.reader import Trace

__all__ = ["context_without_region"]

MISSING = re.compile(r"'(?P<function>\w+?)(?:Backward)?' object has no attribute '_(?:fwd_used_autocast|dtype)'")
"""What ``custom_bwd`` says of a context that ``custom_fwd`` has not written to."""


def context_without_region(trace: Trace) -> Iterator[Finding]:
    """``custom_bwd`` without a ``custom_fwd`` that could have left it anything: none at all, or one without ``ctx``."""
    raised = trace.last(Raised)
    found = MISSING.search(raised.message) if raised is not None and raised.type == "AttributeError" else None
    if raised is None or found is None:
        return
    function = found["function"]
    statement = Statement(
        id="custom-function-autocast",
        confidence=Confidence.LIKELY,
        summary=f"The backward of {function} asks for the autocast region of its forward, which was not noted.",
        cause=(
            "custom_fwd leaves the region's dtype in the ctx that forward gets as its first argument, and custom_bwd reads it "
            f"there. The forward of {function} is not decorated, or has no ctx because the function defines setup_context."
        ),
        evidence=how_the_run_ended(trace),
    )
    finding = located(statement, phase=raised.phase, step=raised.step, source=raising_line(raised))
    yield replace(finding, references=("https://github.com/pytorch/pytorch/issues/132388", *finding.references))
