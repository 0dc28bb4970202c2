"""Exceptions that the program caught: which of them are failures, and which only chose another way."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.incidents import REFUSED
from dtypedoctor.diagnosis.messages import complaint_of, is_dtype_error
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Caught, Metric, Raised, Sample, Site
from dtypedoctor.trace.model import Trace

_OF_A_SCALER = ("Attempting to unscale", "No inf checks were recorded")
OFTEN = 3
"""An operator outside of modules that raises so often is no probe, even if the program computes something else in between."""
_OF_MEMORY = "out of memory"


def with_caught(run: Run) -> Run:
    """The run, with an exception that the program caught as what it raised, where that is a failure and nothing worse was raised.

    It is none where the program went on from there: where the module that raised it has returned since, or the call around it,
    or an optimizer has made a step; nor in a test that passes.
    """
    run = replace(
        run,
        ranks=tuple(map(with_caught, run.ranks)),
        children={number: with_caught(child) for number, child in run.children.items()},
    )
    raised = run.trace.last(Raised)
    failure = None
    if raised is None or not _is_complaint(raised):
        failure = next(_failures(run), None)
    if failure is None:
        return run
    trace = run.trace
    return replace(run, trace=replace(trace, records=(*trace.records, failure.raised())))


def noted(run: Run) -> Iterator[str]:
    """The exceptions about dtypes or values that the program caught and went on from, each in words."""
    failed = run.trace.last(Raised)
    for caught in run.trace.all(Caught):
        same = failed is not None and (failed.type, failed.message) == (caught.type, caught.message)
        if _is_complaint(caught) and not same and not caught.ending:
            where = f" in {caught.modules[-1]}" if caught.modules and caught.modules[-1] else ""
            said = caught.message.splitlines()[0][:160] if caught.message else ""
            yield (
                f"{caught.type}{where} in {run.trace.moment(caught.step)}: the program caught it and continued, so it does "
                f"not count as a failure: {said}"
            )


def said_of_caught(findings: tuple[Finding, ...], trace: Trace) -> tuple[Finding, ...]:
    """The findings; those that only an exception shows which the program caught say so."""
    raised = trace.last(Raised)
    if raised is None or not raised.caught:
        return findings
    others = replace(trace, records=tuple(record for record in trace.records if record is not raised))
    without = {(finding.id, finding.fqn) for finding in diagnose(others)}
    how = f"It was raised in {trace.moment(raised.step)} and was caught by the program."
    return tuple(f if (f.id, f.fqn) in without else replace(f, summary=f"{f.summary} {how}") for f in findings)


def _failures(run: Run) -> Iterator[Caught]:
    """The exceptions that are failures, the likeliest first: what the program ended with, then what it never got past."""
    complaints = list(_complaints(run))
    for ending in complaints:
        if ending.ending:
            yield next(one for one in complaints if _is_same(one, ending))
    for caught in complaints:
        if not caught.ending and not _went_on(run.trace, caught):
            yield caught


def _complaints(run: Run) -> Iterator[Caught]:
    """The exceptions about dtypes or values, those left out that a test expects which passes."""
    passed = run.exit.code == 0
    for caught in run.trace.all(Caught):
        if _is_complaint(caught) and not (caught.tested and passed):
            yield caught


def _is_same(one: Caught, other: Caught) -> bool:
    return (one.type, one.message) == (other.type, other.message)


def _is_complaint(raised: Raised | Caught) -> bool:
    """Whether an exception is about dtypes or values. That memory ran out is a reason to try a smaller batch."""
    if _OF_MEMORY in raised.message:
        return False
    record = raised if isinstance(raised, Raised) else raised.raised()
    return (
        is_dtype_error(record)
        or complaint_of(raised.message) is not None
        or REFUSED.search(raised.message) is not None
        or any(words in raised.message for words in _OF_A_SCALER)
    )


def _went_on(trace: Trace, caught: Caught) -> bool:
    """Whether what raised it, or what was around it, has succeeded since, or the program has gone on training."""
    if any(metric.n > caught.n for metric in trace.all(Metric)):
        return True
    if _is_outside(caught) and sum(_is_same(one, caught) for one in trace.all(Caught)) >= OFTEN:
        return False
    later = (sample for sample in trace.samples if sample.n >= caught.n)
    return any(_is_success(sample, trace.sites[sample.site], caught) for sample in later)


def _is_outside(caught: Caught) -> bool:
    """Whether an operator outside of all modules raised it."""
    return caught.root < 0 and not caught.modules and caught.phase in ("forward", "generate")


def _is_success(sample: Sample, site: Site, caught: Caught) -> bool:
    """Whether a measurement shows an optimizer's step, or the return of what had raised ``caught`` or of the call around it."""
    if site.kind == "param":
        return True
    if _is_outside(caught):
        return site.kind in ("output", "loss")
    raised_in = (caught.root, caught.modules[-1] if caught.modules else "")
    return site.kind == "output" and (sample.call == caught.call or (site.root, site.fqn) == raised_in)
