"""Where the program noticed a failure, which is rarely the line to change."""

from dtypedoctor.analysis import ending_of
from dtypedoctor.diagnosis.wording import own_frame, shown_line
from dtypedoctor.examination.results import Treatment
from dtypedoctor.text import one_line
from dtypedoctor.trace.events import Metric, Raised, Sample, ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import NonfiniteReached

_SPELLED = {"nan": "NaN"}


def noticed_in(treatment: Treatment) -> str:
    """What the program itself showed of a failure, when and at which line: a loss that is not finite, the exception; empty where it showed nothing."""
    run = treatment.before
    loss = _bad_loss(run.trace)
    ending = ending_of(run)
    if ending.raised is None:
        return loss
    line = _own_line(ending.raised)
    words = ending.words.replace(ending.raised.type, f"{ending.raised.type} at {line}", 1) if line else ending.words
    return one_line(f"{loss}; then {words}" if loss else words, 400)


def _bad_loss(trace: Trace) -> str:
    """The first loss that is not finite: what it is, in which step, and the line that used it."""
    name = "the loss times GradScaler's scale" if trace.all(ScalerState) else "the loss"
    for sample, site in trace.measured():
        if site.kind == "loss" and not sample.finite:
            line = _line_of(trace, sample)
            return f"{name} is {'NaN' if sample.num_nan else 'inf'} in {trace.moment(sample.step)}" + (
                f", at {line}" if line else ""
            )
    for metric in trace.all(Metric):
        if "loss" in metric.nonfinite:
            value = metric.spelled.get("loss", "nan")
            return f"the loss is {_SPELLED.get(value, value)} in {trace.moment(metric.step)}"
    return ""


def _line_of(trace: Trace, loss: Sample) -> str:
    """The line at which a backward pass began with this loss, or else the first one that read it as a number; empty where neither is known."""
    seen = [one.what for one in trace.observed(NonfiniteReached)]
    began = next((one for one in seen if one.sample == loss.n), None)
    if began is None:
        return ""
    read = [one.source for one in seen if one.id == began.id and one.what in ("item", "guard")]
    return next(filter(None, [began.source, *read]), "")


def _own_line(raised: Raised) -> str:
    """``train.py:31`` of the program's innermost frame; empty where no frame is the program's."""
    own = own_frame(raised)
    return shown_line(own.rpartition(" ")[0]) if own is not None else ""
