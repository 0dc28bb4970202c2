"""The module watch as a story: what was measured first, and what was not finite first."""

from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.reader import Trace

MEASURED = frozenset({"output", "loss", "grad_output", "grad", "param"})
"""Site kinds that tell a story of their own; inputs are measured only to decide who is to blame."""


def first_nonfinite(trace: Trace) -> tuple[Sample, Site] | None:
    """The earliest sample that is not finite."""
    for sample in trace.samples:
        if not sample.finite:
            site = trace.sites.get(sample.site)
            if site is not None and site.kind in MEASURED:
                return sample, site
    return None


def class_of(trace: Trace, fqn: str) -> str:
    """Class name of the module ``fqn``, or an empty string."""
    return next((s.cls for s in trace.sites.values() if s.fqn == fqn and s.cls), "")


def same_call(trace: Trace, sample: Sample) -> list[tuple[Sample, Site]]:
    """The samples of module outputs (or gradients) in the call and phase of ``sample``, in execution order."""
    here = trace.sites[sample.site]
    return [
        (s, site)
        for s in trace.samples
        if s.call == sample.call and (site := trace.sites[s.site]).kind == here.kind and site.phase == here.phase
    ]
