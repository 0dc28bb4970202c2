"""The module watch as a story: what was measured first, and what was not finite first."""

from dtypedoctor.diagnosis.incidents import MEASURED, incidents
from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.reader import Trace

__all__ = ["MEASURED", "class_of", "first_nonfinite", "same_call"]


def first_nonfinite(trace: Trace) -> tuple[Sample, Site] | None:
    """The earliest sample that is not finite and gets somewhere (see :mod:`dtypedoctor.diagnosis.incidents`)."""
    for incident in incidents(trace):
        if incident.sample is not None and incident.site is not None:
            return incident.sample, incident.site
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
