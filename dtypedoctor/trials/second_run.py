"""Whether a second run shows what the first one did: only then does what it shows explain the first."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.incidents import Incident
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Raised, Sample, Site
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.execution import CompileCounts

__all__ = ["another_way", "unconfirmed"]


def another_way(first: Run, second: Run) -> str:
    """How the second run differs from the first in what fails, where and when; empty where it does not.

    The second run may measure more: code that was compiled runs its modules, and every step is looked at.
    """
    again = next((run for run in second.ranks if run.rank == first.rank), second).trace
    one, other = analysis_of(first.trace).raised, analysis_of(again).raised
    if _key(one, first.trace) != _key(other, first.trace):
        return f"the first run {_raised(one, first.trace)}, the second {_raised(other, again)}"
    incident, early = analysis_of(first.trace).measured_incident, analysis_of(again).measured_incident
    if incident is not None and early is not None and _is_new(first.trace, early, before=incident.step):
        place, when = short(early.site.fqn if early.site is not None else None), first.trace.moment(early.step)
        return f"in the second run {place} was not finite in {when} already, in the first it was finite there"
    if incident is None or incident.site is None or _is_bad_there(again, incident.site, incident.step):
        return ""
    name = "the loss" if incident.kind == "loss" else short(incident.site.fqn)
    when = f"{first.trace.moment(incident.step)} ({incident.phase})"
    return f"in the first run {name} was not finite in {when}, in the second it was finite there"


def unconfirmed(findings: tuple[Finding, ...], second: Trace, why: str) -> tuple[Finding, ...]:
    """The findings of a first run; those that the second does not show as well are no more than likely.

    Args:
        findings: of the first run.
        second: trace of the second.
        why: what the second run did instead, in words.
    """
    again = set(map(_where, analysis_of(second).findings))
    return tuple(finding if _where(finding) in again else _capped(finding, why) for finding in findings)


def _where(finding: Finding) -> tuple[object, ...]:
    return finding.id, finding.fqn, finding.phase, finding.step


def _capped(finding: Finding, why: str) -> Finding:
    confidence = Confidence.LIKELY if finding.confidence is Confidence.PROVEN else finding.confidence
    said = f"This is what the first run showed; no second run confirms it: {why}."
    return replace(finding, confidence=confidence, proven_by=None, evidence=(*finding.evidence, said))


def _key(raised: Raised | None, first: Trace) -> tuple[object, ...]:
    """What has to be equal of two exceptions; of code that was compiled in the first run only when they were raised."""
    if raised is None:
        return ()
    compiled = any(seen.what.unique_graphs for seen in first.observed(CompileCounts))
    return (raised.step,) if compiled else (raised.step, raised.phase, raised.type, *raised.modules[-1:])


def _raised(raised: Raised | None, trace: Trace) -> str:
    if raised is None:
        return "raises nothing"
    where = f" in {short(raised.modules[-1])}" if raised.modules else ""
    return f"raises {raised.type}{where} in {trace.moment(raised.step)} ({raised.phase})"


def _is_new(first: Trace, early: Incident, *, before: int) -> bool:
    """Whether what the second run had in an earlier step was measured in the first one, and finite: the second has begun elsewhere.

    It has resumed from what the first has saved, say.
    """
    if early.site is None or early.step >= before:
        return False
    found = [sample.finite for sample in _measured_there(first, early.site, early.step)]
    return bool(found) and all(found)


def _is_bad_there(trace: Trace, place: Site, step: int) -> bool:
    """Whether the same place is not finite in the same step."""
    return not all(sample.finite for sample in _measured_there(trace, place, step))


def _measured_there(trace: Trace, place: Site, step: int) -> Iterator[Sample]:
    for sample in trace.samples:
        site = trace.sites[sample.site]
        if sample.step == step and (site.kind, site.root, site.fqn, site.phase) == (
            place.kind,
            place.root,
            place.fqn,
            place.phase,
        ):
            yield sample
