"""What went wrong in one run, boiled down to what a bisection compares."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.incidents import Incident
from dtypedoctor.diagnosis.window import is_dtype_error
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Correction, ProbeLogProbs, Raised, Sample, Site
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.bisection.tolerance import Tolerance
from dtypedoctor.trials.reduction import Outcome

OWN = "::self"
"""What is appended to a module's dotted name to mean its own arithmetic, without the modules in it."""


class Kind(StrEnum):
    """The families of failures; two runs of one family fail alike."""

    HEALTHY = "healthy"
    NOT_FINITE = "not-finite"
    DTYPE_ERROR = "dtype-error"
    INACCURATE = "inaccurate"
    RAISED = "raised"
    DIED = "died"
    NOT_INSTALLED = "not-installed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What one run came to.

    Attributes:
        reason: one sentence without a full stop.
        detail: what tells failures of one family apart: the exception's class, how the process died.
        phase, step, call: where it failed; None where it did not, or where that is unknown.
        fqn: the module that it failed in (``NAME::self`` for its own arithmetic), or that reached the largest share of its
            dtype's range where nothing failed.
        absmax: the largest finite magnitude among the module outputs and gradients in 16-bit dtypes (in any dtype, where
            there are no such).
        share: that over the largest number of its dtype.
        seconds: wall-clock time of the run.
    """

    kind: Kind
    reason: str
    detail: str = ""
    phase: str | None = None
    step: int | None = None
    call: int | None = None
    fqn: str | None = None
    absmax: float | None = None
    share: float | None = None
    seconds: float = 0.0

    @property
    def healthy(self) -> bool:
        """Finite, without a dtype error, and as accurate as it should be."""
        return self.kind is Kind.HEALTHY

    def outcome(self, failure: "Symptom") -> Outcome:
        """What this run says about ``failure``: passes, fails the same way, or fails otherwise."""
        if self.healthy:
            return Outcome.PASS
        same = self.kind is failure.kind and self.detail == failure.detail
        return Outcome.FAIL if same else Outcome.UNRESOLVED


def part_in_words(name: str) -> str:
    """A candidate as a person would say it: a module whole, or only its own arithmetic."""
    module = short(name.removesuffix(OWN))
    return f"the own arithmetic of {module}" if name.endswith(OWN) else module


def symptom_of(run: Run, tolerance: Tolerance | None = None) -> Symptom:
    """What ``run`` came to.

    Args:
        run: a watched run.
        tolerance: how far its outputs may be from the reference's; None judges by finiteness and exceptions alone.
    """
    trace = run.trace
    incident = next(iter(analysis_of(trace).incidents), None)
    found = next(_symptoms(run, tolerance, incident), None)
    last = incident.sample if incident is not None and found is not None else None
    peak = _peak(trace, last)
    if found is None:
        found = Symptom(kind=Kind.HEALTHY, reason="healthy", fqn=peak.fqn if peak else None)
    if peak is not None:
        found = replace(found, absmax=peak.absmax, share=peak.share)
    return replace(found, seconds=run.exit.seconds)


def refused(message: str) -> Symptom:
    """The symptom of a run that could not be done at all."""
    return Symptom(kind=Kind.REFUSED, reason=message.splitlines()[0] if message else "refused")


def _symptoms(run: Run, tolerance: Tolerance | None, incident: Incident | None) -> Iterator[Symptom]:
    """What speaks against calling the run healthy, the earliest cause first."""
    trace = run.trace
    missing = next((c for c in trace.all(Correction) if not c.installed), None)
    if missing is not None:
        yield Symptom(kind=Kind.NOT_INSTALLED, reason=f"{missing.id}: {missing.reason}", detail=missing.id)
    if incident is not None:
        yield _not_finite(trace, incident)
    raised = analysis_of(trace).raised
    if raised is not None:
        yield _raised(raised)
    if run.died:
        yield _died(run)
    if trace.stopped is not None:
        yield Symptom(
            kind=Kind.DIED, reason=f"only a part of it was recorded: {os.strerror(trace.stopped.errno)}", detail="disk"
        )
    yield from _bad_numbers(trace)
    excess = tolerance.excess(trace) if tolerance is not None else None
    if excess is not None:
        yield Symptom(kind=Kind.INACCURATE, reason=excess.words, step=excess.step, phase="forward", call=1)


def _bad_numbers(trace: Trace) -> Iterator[Symptom]:
    """Numbers outside of the modules: what the workload reports, and the outputs on the probe batch."""
    for metric in analysis_of(trace).nonfinite_metrics:
        reason = f"{', '.join(metric.nonfinite)} not finite in step {metric.step}"
        yield Symptom(kind=Kind.NOT_FINITE, reason=reason, step=metric.step)
    for probe in trace.all(ProbeLogProbs):
        if None in probe.values:
            reason = f"outputs on the probe batch not finite after step {probe.step}"
            yield Symptom(kind=Kind.NOT_FINITE, reason=reason, step=probe.step)


def _died(run: Run) -> Symptom:
    site = run.trace.cursor.site if run.trace.cursor is not None else None
    return Symptom(
        kind=Kind.DIED,
        reason=run.last_words(),
        detail="time limit" if run.exit.timed_out else str(run.exit.code),
        phase=site.phase if site else None,
        fqn=site.fqn if site else None,
    )


def _raised(raised: Raised) -> Symptom:
    message = raised.message.splitlines()[0] if raised.message else ""
    return Symptom(
        kind=Kind.DTYPE_ERROR if is_dtype_error(raised) else Kind.RAISED,
        reason=f"{raised.type} in step {raised.step} ({raised.phase}): {message[:160]}",
        detail=raised.type,
        phase=raised.phase,
        step=raised.step,
        call=raised.call,
        fqn=raised.modules[-1] if raised.modules else None,
    )


def _not_finite(trace: Trace, incident: Incident) -> Symptom:
    sample, site = incident.sample, incident.site
    fqn = _origin(trace, sample, site) if sample is not None and site is not None else None
    where = part_in_words(fqn) if fqn is not None else "the code outside of any module"
    return Symptom(
        kind=Kind.NOT_FINITE,
        reason=f"inf or NaN, first in {where}, step {incident.step} ({incident.phase})",
        phase=incident.phase,
        step=incident.step,
        call=incident.call,
        fqn=fqn,
    )


def _origin(trace: Trace, sample: Sample, site: Site) -> str:
    """The module that made what is not finite: the measured one, or whoever fed it with what was so already.

    A module whose input was not finite is asked no further; its caller computed that input, unless it got it, too.
    """
    if site.kind != "output":
        return site.fqn
    spoilt = {
        other.fqn
        for s in trace.samples
        if s.n >= sample.n and s.call == sample.call and not s.finite and (other := trace.sites[s.site]).kind == "input"
    }
    fqn = site.fqn
    if fqn not in spoilt:
        has_parts = any(
            other.fqn.startswith(f"{fqn}." if fqn else "") and other.fqn != fqn for other in trace.sites.values()
        )
        return fqn + OWN if has_parts else fqn
    while fqn in spoilt and fqn:
        fqn = fqn.rpartition(".")[0]
    return fqn + OWN


class _Peak(NamedTuple):
    share: float
    absmax: float
    fqn: str


def _peak(trace: Trace, until: Sample | None) -> _Peak | None:
    """The module that came nearest to the end of its dtype's range, and the largest magnitude that it reached."""
    best: _Peak | None = None
    for narrow in (True, False):
        for sample in trace.samples:
            if until is not None and sample.n > until.n and sample.call > until.call:
                break
            site = trace.sites.get(sample.site)
            if site is None or site.kind not in ("output", "input", "grad_output") or site.dtype not in DTYPES:
                continue
            dtype = DTYPES[site.dtype]
            if narrow and dtype.bits > 16:
                continue
            share = sample.absmax / dtype.max
            if best is None or share > best.share:
                best = _Peak(share, sample.absmax, site.fqn)
        if best is not None:
            break
    return best
