"""What a finding may say of the modules and operators of a run: only what was measured of them."""

from dtypedoctor.trace.events import Coverage
from dtypedoctor.trace.model import Trace

ENOUGH = 0.9
"""Share of what ran that has to be measured before anything is said of all of it. Operators are sampled, so any number is enough."""


def compiled_outside(trace: Trace) -> bool:
    """Whether compiled functions were called outside of modules: whatever modules they call, none of those is measured."""
    covered = trace.last(Coverage)
    return covered is not None and covered.compiled_outside > 0


def operators_were_seen(trace: Trace) -> bool:
    """Whether a value that no recorded operator has made was made by none."""
    covered = trace.last(Coverage)
    if covered is None:
        return True
    return not covered.compiled_outside and covered.module_calls_measured >= ENOUGH * _calls(covered)


def modules_were_finite(trace: Trace) -> str:
    """What is known of all modules where the first value that is not finite is none of theirs."""
    covered = trace.last(Coverage)
    if covered is None:
        returned = any(site.kind == "output" for site in trace.sites.values())
        return "everything measured of what modules returned was finite" if returned else "no module call was measured"
    calls, measured = _calls(covered), covered.module_calls_measured
    unseen = ", nor was what compiled functions compute" if covered.compiled_outside else ""
    if not measured:
        return f"what modules returned was not measured{unseen}" if calls or unseen else "no module was called"
    if unseen or measured < calls:
        return f"what was measured of the modules ({measured:,} of {calls:,} calls) was finite{unseen and '; what compiled functions compute was not measured'}"
    return "everything that modules returned was finite"


def _calls(covered: Coverage) -> int:
    """How many module calls ran, also those that were left out by a budget."""
    return covered.module_calls + covered.module_calls_skipped
