"""One module for each failure: what is known of it, and what finds it. Any module here that has ``RULES`` is a part of the program.

The names below are what a rule is written with, here and in other packages (entry points of the group ``dtypedoctor.rules``).
"""

from dtypedoctor.diagnosis.rule import (
    COMPILE_AND_LOAD,
    DTYPE_MISMATCH,
    LOSS_SCALING,
    NON_FINITE,
    SILENT,
    Confidence,
    Finding,
    FindingSpec,
    Rule,
    Severity,
)
from dtypedoctor.diagnosis.statement import Statement, make_finding
from dtypedoctor.trace.model import Trace

__all__ = ["COMPILE_AND_LOAD", "DTYPE_MISMATCH", "LOSS_SCALING", "NON_FINITE", "SILENT", "Confidence", "Finding", "FindingSpec", "Rule",
           "Severity", "Statement", "Trace", "located", "make_finding"]  # fmt: skip

located = make_finding
"""The name by which rules of other packages may know it."""
