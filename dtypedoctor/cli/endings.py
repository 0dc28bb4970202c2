"""The exit code that a finished run stands for: one table for every verb."""

from collections.abc import Callable

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.errors import ExitCode
from dtypedoctor.report.model import Report, Status

__all__ = ["ENDINGS", "exit_code"]

ENDINGS: tuple[tuple[str, Callable[[Report], bool], ExitCode], ...] = (
    ("no usable trace, and no finding without one", lambda r: not (r.trace_usable or r.findings), ExitCode.NO_TRACE),
    ("fails and is fixed as the scenario says", lambda r: r.expectation_met is True, ExitCode.OK),
    ("not what the scenario says", lambda r: r.expectation_met is False, ExitCode.FINDINGS),
    ("a bisection of what fails", lambda r: r.bisection is not None and r.bisection["end"] != "healthy", ExitCode.FINDINGS),
    ("a finding that is more than a note", lambda r: any(f.severity is not Severity.INFO for f in r.findings), ExitCode.FINDINGS),
    ("killed, stopped, raised, status not 0, not measured", lambda r: r.status is not Status.HEALTHY, ExitCode.FINDINGS),
    ("differs without instrumentation", lambda r: r.observer.bitwise_equal is False, ExitCode.FINDINGS),
    ("nothing wrong", lambda r: True, ExitCode.OK),
)  # fmt: skip
"""How a run ends, in the order in which it is decided, and the exit code of the command."""


def exit_code(report: Report) -> int:
    """The exit code that a finished report stands for: that of the first line of :data:`ENDINGS` that holds."""
    return int(next(code for _, holds, code in ENDINGS if holds(report)))
