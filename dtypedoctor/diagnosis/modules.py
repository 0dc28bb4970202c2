"""The module watch as a story: which modules there are, and what was measured of one call."""

from dtypedoctor.diagnosis.incidents import MEASURED
from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.reader import Trace

__all__ = ["MEASURED", "class_of", "same_call"]


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
