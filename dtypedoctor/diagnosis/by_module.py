"""What the module watch alone can say about something that is not finite, where no op trace was open."""

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.incidents import GRADIENTS, Incident, Reached
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import class_of, how_the_run_ended, limit_of, module_of, short
from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.reader import Trace

NO_OPS = "no op trace says which operation made it"


def judge_by_module(trace: Trace, incident: Incident) -> Finding:
    """The module that first returned the bad value, or whose own code made it; never more than possible."""
    sample, site = incident.sample, incident.site
    if sample is None or site is None:
        return _outside(trace, incident)
    came_in = site.kind == "output" and _input_was_bad(trace, sample, site)
    fqn = _fqn(site, came_in=came_in)
    if came_in and site.phase == "forward" and _outermost_was_given_it(trace, sample, site):
        return _of_the_input(trace, incident, sample, site)
    said = Statement(
        id=_finding_id(site),
        confidence=Confidence.POSSIBLE,
        summary=f"{short(fqn)} is where {site.dtype} first stops being finite, in step {sample.step} ({incident.phase}).",
        cause=f"The first inf or NaN was seen {_where(site)}; {NO_OPS}.",
        evidence=(
            (
                f"{sample.num_nan} NaN and {sample.num_inf} inf; largest finite magnitude {sample.absmax:.6g} "
                f"(largest {site.dtype}: {limit_of(site.dtype):.6g})."
            ),
            *(
                (("Its input was already not finite." if came_in else "Its input was finite."),)
                if site.kind == "output"
                else ()
            ),
            *how_the_run_ended(trace),
        ),
    )
    cls = class_of(trace, fqn or "")
    return located(said, phase=incident.phase, step=sample.step, fqn=fqn, dtype=site.dtype, cls=cls)


def _of_the_input(trace: Trace, incident: Incident, sample: Sample, site: Site) -> Finding:
    said = Statement(
        id="nonfinite-input",
        confidence=Confidence.LIKELY,
        summary=f"The input of the model is not finite already, in step {sample.step}.",
        cause="The data holds NaN or inf before the model computes anything, so no dtype of the model can help.",
        evidence=(
            f"{short(site.fqn)} is the first module to output it: {sample.num_nan} NaN and {sample.num_inf} inf.",
            "The outermost module was called with a tensor that is not finite.",
            *how_the_run_ended(trace),
        ),
    )
    return located(said, phase=incident.phase, step=sample.step, fqn="", dtype=site.dtype, cls=class_of(trace, ""))


def _outermost_was_given_it(trace: Trace, sample: Sample, site: Site) -> bool:
    """Whether the outermost module of the same call has output something bad as well, and had a bad input."""
    given = (
        later
        for later in trace.samples
        if later.n >= sample.n
        and later.call == sample.call
        and (other := trace.sites.get(later.site)) is not None
        and (other.kind, other.root, other.fqn) == ("input", site.root, "")
    )
    return any(not later.finite for later in given)


def _outside(trace: Trace, incident: Incident) -> Finding:
    if incident.reached is not None:
        return _read(trace, incident.reached)
    said = Statement(
        id="domain-error",
        confidence=Confidence.POSSIBLE,
        summary=f"Code outside of all modules refused a value that is not finite, in step {incident.step} ({incident.phase}).",
        cause=f"Everything that modules returned was finite; {NO_OPS}.",
        evidence=how_the_run_ended(trace),
    )
    return located(said, phase=incident.phase, step=incident.step)


def _read(trace: Trace, value: Reached) -> Finding:
    seen = value.seen
    first = next(
        (site for s in trace.samples if not s.finite and (site := trace.sites[s.site]).kind == "operator"), None
    )
    op, _, source = first.fqn.partition(" ") if first is not None else (None, "", None)
    made = (
        f"{op} at {source} is the first operator outside of modules seen to output one."
        if first is not None
        else f"{NO_OPS}."
    )
    said = Statement(
        id="domain-error",
        confidence=Confidence.POSSIBLE,
        summary=f"A value that is not finite {value.got} in step {seen.step} ({seen.phase}).",
        cause=f"The value was computed outside of all modules; {made}",
        evidence=how_the_run_ended(trace),
    )
    return located(said, phase=seen.phase, step=seen.step, op=op, source=source or value.source)


def _finding_id(site: Site) -> str:
    if site.dtype != "float16":
        return "domain-error"
    if site.kind == "param":
        return "optimizer-epsilon-underflow"
    return "backward-overflow" if site.kind in GRADIENTS else "float16-overflow"


def _fqn(site: Site, *, came_in: bool) -> str | None:
    if site.kind == "loss" or (site.kind == "accumulated" and not site.root):
        return None
    if site.kind in ("param", "grad"):
        return module_of(site.fqn)
    return module_of(site.fqn) if came_in else site.fqn


def _where(site: Site) -> str:
    if site.kind == "loss":
        return "in the loss, and everything that modules returned was finite"
    return f"at {short(site.fqn)}"


def _input_was_bad(trace: Trace, sample: Sample, site: Site) -> bool:
    """Whether an input of the module was not finite either; inputs are measured right after a bad output."""
    for later in trace.samples:
        other = trace.sites.get(later.site)
        if other is None or other.kind != "input" or later.n < sample.n or later.call != sample.call:
            continue
        if (other.root, other.fqn) == (site.root, site.fqn):
            return not later.finite
    return False
