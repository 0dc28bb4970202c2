"""Where a replay, or another run, opens the op trace: at a failure, at packed weights that may be dequantized wrongly, at gradients that may underflow."""

from collections import defaultdict
from collections.abc import Iterator

from dtypedoctor.diagnosis.incidents import Incident, incidents
from dtypedoctor.diagnosis.nonfinite_origin import Origin, searched
from dtypedoctor.diagnosis.ops import graph_of
from dtypedoctor.diagnosis.wording import is_dtype_error, module_of
from dtypedoctor.scenario.model import Window
from dtypedoctor.trace.events import ParameterNote, Raised, ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import Unscaled
from dtypedoctor.trace.records.models import PackedWeight
from dtypedoctor.trace.records.silent import GradientZeros, ScaledBackward


def suspicious_windows(trace: Trace) -> tuple[Window, ...]:
    """The windows in which the failure of ``trace`` may happen, the likeliest first: of a refused op, else of non-finite
    values that matter, else of packed weights that may be dequantized wrongly, else of gradients that may have been flushed
    to zero.

    Those that the op trace of ``trace`` has settled already are left out: nothing is left where it explains the failure, and
    the next one is first where it shows that what looked like it was harmless.
    """
    raised = trace.last(Raised)
    if raised is not None and (is_dtype_error(raised) or _may_be_packed(trace, raised)):
        return (_of_refusal(trace, raised),) if graph_of(trace).failed() is None else ()
    if incidents(trace):
        return tuple(_unsettled(trace))
    doubt = doubtful_weights(trace)
    return (doubt,) if doubt is not None else tuple(_of_zeros(trace))


def doubt_in_words(trace: Trace) -> str:
    """What only the op trace can settle, where the run shows no failure; empty where there is nothing."""
    window = next(iter(suspicious_windows(trace)), None)
    if window is None:
        return ""
    if window.scaled:
        zeros = trace.observed(GradientZeros)[0]
        names = list(zeros.what.parameters)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"most of the float16 gradient of {names[0]}{more} is zero in {trace.moment(zeros.step)} and there is no loss scaler; only a "
            "backward pass with the loss multiplied can tell whether float16 has flushed it to zero"
        )
    return "something that only an op trace can settle was seen, and there is none"


def _of_refusal(trace: Trace, raised: Raised) -> Window:
    """What is refused outside of modules after a backward pass, when weights are averaged say, lies behind the end of the last call's window; what a
    gradient scaler is refused lies before the optimizer's step."""
    outside = raised.phase == "forward" and not raised.modules
    if raised.phase == "optimizer" and trace.observed(Unscaled):
        return Window(step=raised.step, until="optimizer", early=True)
    of_call = (site.kind for sample, site in trace.measured() if sample.call == raised.call and sample.n < raised.n)
    if outside and not {"loss", "grad"}.isdisjoint(of_call):
        return Window(step=1 if trace.by_call else raised.step, until="optimizer", early=True)
    return _window(raised.phase, raised.call, raised.step)


def _may_be_packed(trace: Trace, raised: Raised) -> bool:
    """Whether a product may have been given packed storage, whose shape is refused before its dtype is."""
    return "shapes cannot be multiplied" in raised.message and any(note.quant for note in trace.all(ParameterNote))


def _unsettled(trace: Trace) -> Iterator[Window]:
    for incident, seen in searched(graph_of(trace)):
        if seen.covered and not seen.harmless:
            if seen.origin is not None and _was_written_between(trace, seen.origin):
                yield Window(call=incident.call, early=True)
            return
        if not seen.covered:
            yield _of_incident(trace, incident)


def _was_written_between(trace: Trace, origin: Origin) -> bool:
    """Whether a parameter that no op has made bad was fine in an earlier call, and what came before this call was not looked at."""
    given, incident = origin.given, origin.incident
    if given is None or given.name is None or given.origin != "parameter" or incident.phase != "forward":
        return False
    if any(op.call < incident.call and not op.sentinel for op in origin.graph.ops):
        return False
    return _returned_finite(trace, origin.op.root, module_of(given.name), before=incident.call)


def _returned_finite(trace: Trace, root: int, fqn: str, *, before: int) -> bool:
    """Whether a module returned something finite in a call before the one with this number."""
    for sample, site in trace.measured():
        if (site.kind, site.root, site.fqn) == ("output", root, fqn) and sample.finite and sample.call < before:
            return True
    return False


def _of_incident(trace: Trace, incident: Incident) -> Window:
    if incident.phase != "optimizer" and (incident.call == 0 or _is_of_a_sum(trace, incident)):
        return Window(step=incident.step, until="optimizer", early=True)
    outside = incident.kind in ("loss", "reached")  # everything that modules returned was finite
    return _window(incident.phase, incident.call, incident.step, early=outside)


def _is_of_a_sum(trace: Trace, incident: Incident) -> bool:
    """Whether a gradient that several backward passes have added up is not finite, and none of them passed on anything bad."""
    losses = (sample for sample, site in trace.measured() if site.kind == "loss")
    calls = {loss.call for loss in losses if loss.step == incident.step and loss.n < incident.n}
    return incident.kind in ("grad", "accumulated") and len(calls) > 1


def _of_zeros(trace: Trace) -> Iterator[Window]:
    """Float16 gradients that are zero for the most part, where no loss scaler lifts them."""
    if trace.all(ScalerState) or trace.observed(ScaledBackward):
        return
    for zeros in trace.observed(GradientZeros)[:1]:
        yield Window(call=zeros.call, until="backward", scaled=True)


def _window(phase: str, call: int, step: int, *, early: bool = False) -> Window:
    if phase == "optimizer":
        return Window(step=step, until="optimizer")
    until = "backward" if phase in ("backward", "recompute") else "next-call"
    return Window(call=max(call, 0), until=until, early=early and until == "next-call")  # type: ignore[arg-type]


USUAL = frozenset({"float16", "bfloat16"})
"""Dtypes of quantization states that every dequantizer has a kernel for."""


def doubtful_weights(trace: Trace) -> Window | None:
    """The first call of a model whose packed weights are worth comparing with what is multiplied.

    That is a model whose quantization states say something else than those of a model before it in the same process (which
    may have left a buffer of its dtype behind), or something that is no 16-bit dtype (for which a kernel may be missing).
    None where there is no such model, or where its first call has been looked at.
    """
    before: set[str] = set()
    for root, dtypes in sorted(_states(trace).items()):
        if dtypes - USUAL or (before and not dtypes <= before):
            call = _first_call(trace, root)
            return None if call is None or _is_compared(trace, call) else Window(call=call)
        before |= dtypes
    return None


def _states(trace: Trace) -> dict[int, set[str]]:
    """The dtypes that the quantization states of each outermost module say."""
    states: dict[int, set[str]] = defaultdict(set)
    for note in trace.all(ParameterNote):
        if note.quant and note.quant.get("dtype"):
            states[note.root].add(str(note.quant["dtype"]))
    return states


def _first_call(trace: Trace, root: int) -> int | None:
    roots = {number for number, site in trace.sites.items() if site.root == root and site.kind == "output"}
    return next((sample.call for sample in trace.samples if sample.site in roots), None)


def _is_compared(trace: Trace, call: int) -> bool:
    return any(seen.call == call for seen in trace.observed(PackedWeight))
