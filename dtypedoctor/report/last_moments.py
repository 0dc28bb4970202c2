"""What a trace without an end still says of the process's last moments, and what it lacks."""

from dtypedoctor.analysis import analysis_of
from dtypedoctor.report.text import one_line
from dtypedoctor.runner.launch import Run
from dtypedoctor.trace.events import Flow, ParameterNote, Site
from dtypedoctor.trace.reader import Trace

__all__ = ["last_module", "missing_end"]

_KINDS = {"grad_output": "the gradient of", "grad": "the gradient of", "param": "the parameter", "loss": "the loss"}


def last_module(trace: Trace) -> str:
    """A half-sentence that names the module entered last, with its dtypes, and the first value that was not finite."""
    where = _where(trace)
    if not where:
        return " before any module was entered"
    return f"; the last module entered was {where}{_raised_before(trace)}{_first_nonfinite(trace)}"


def missing_end(run: Run) -> str:
    """What a trace without an end record lacks."""
    trace = run.trace
    if trace.stopped is not None:
        return f"the end of the run: the recording stopped before it; the last module entered was {_where(trace) or 'none'}"
    there = (
        f"{len(trace.samples)} measurement(s) up to {trace.moment(trace.samples[-1].step)}"
        if trace.samples
        else "no measurement"
    )
    return f"the end of the run: {_why(run)}; {there} could be read, and {_at_most(trace)}{_first_nonfinite(trace)}"


def _where(trace: Trace) -> str:
    """The module entered last, its dtypes, and when; empty before the first."""
    cursor = trace.cursor
    if cursor is None or cursor.site is None:
        return ""
    name = one_line(cursor.site.fqn or cursor.site.cls)
    return f"{name} ({_dtypes(trace, cursor.site)}) in {trace.moment(cursor.step)} ({cursor.site.phase})"


def _why(run: Run) -> str:
    if run.foreign and not run.died:
        return "the script left without letting Python finish (os._exit, or it became another program)"
    return "the trace has no end record, because the process ended without writing one"


def _at_most(trace: Trace) -> str:
    where = _where(trace)
    if any(site.device == "cuda" for site in trace.sites.values()):
        return "at most what the device had not finished yet is missing" + (
            f"; last entered was {where}" if where else ""
        )
    return f"at most what {where} was doing is missing" if where else "no module had been entered"


def _dtypes(trace: Trace, site: Site) -> str:
    """What went into and came out of the module when it was called before, else what it or its model holds."""
    flows = [flow for flow in trace.all(Flow) if (flow.root, flow.fqn) == (site.root, site.fqn)]
    if flows:
        return f"{_listed(flows[-1].inputs)} in, {_listed(flows[-1].outputs)} out"
    notes = [note for note in trace.all(ParameterNote) if note.root == site.root]
    own = [note.dtype for note in notes if not site.fqn or note.name.startswith(f"{site.fqn}.")]
    return f"holds {_listed(own)}" if own else f"in a model of {_listed([note.dtype for note in notes])}"


def _listed(dtypes: list[str]) -> str:
    return "+".join(dict.fromkeys(dtypes)) or "no tensor"


def _raised_before(trace: Trace) -> str:
    """What was raised before the process was ended by something else; on CUDA the one often leads to the other."""
    raised = analysis_of(trace).raised
    if raised is None:
        return ""
    return (
        f"; {raised.type} was raised in {trace.moment(raised.step)} ({raised.phase}): {one_line(raised.message, 160)}"
    )


def _first_nonfinite(trace: Trace) -> str:
    found = analysis_of(trace).first_bad
    if found is None:
        return ""
    sample, site = found
    place = f"{_KINDS.get(site.kind, 'the output of')} {one_line(site.fqn or site.cls)} ({site.dtype})"
    return f"; the first value that was not finite was in {place} in {trace.moment(sample.step)}"
