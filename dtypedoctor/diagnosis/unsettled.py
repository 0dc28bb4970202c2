"""What an op trace would have to settle of a run, and has not: a failure, packed weights that may be dequantized wrongly, gradients that may underflow."""

from collections import defaultdict

from dtypedoctor.diagnosis.incidents import incidents
from dtypedoctor.diagnosis.nonfinite_origin import Origin, searched
from dtypedoctor.diagnosis.ops import graph_of
from dtypedoctor.diagnosis.wording import is_dtype_error, module_of
from dtypedoctor.trace.events import ParameterNote, Raised, ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.models import PackedWeight
from dtypedoctor.trace.records.silent import GradientZeros, ScaledBackward


def is_unsettled(trace: Trace) -> bool:
    """Whether an op trace would tell more: of a refused op, else of non-finite values that matter, else of packed weights that may be dequantized
    wrongly, else of gradients that may have been flushed to zero."""
    raised = trace.last(Raised)
    if raised is not None and (is_dtype_error(raised) or _may_be_packed(trace, raised)):
        return graph_of(trace).failed() is None
    if incidents(trace):
        return _has_unsettled_incident(trace)
    if doubtful_weights(trace):
        return True
    # float16 gradients are zero for the most part, no loss scaler lifts them, and they were not computed from a multiplied loss
    return bool(trace.observed(GradientZeros)) and not (trace.all(ScalerState) or trace.observed(ScaledBackward))


def _may_be_packed(trace: Trace, raised: Raised) -> bool:
    """Whether a product may have been given packed storage, whose shape is refused before its dtype is."""
    return "shapes cannot be multiplied" in raised.message and any(note.quant for note in trace.all(ParameterNote))


def _has_unsettled_incident(trace: Trace) -> bool:
    """Whether the op trace lacks the first incident that is not harmless, or ends at a parameter that was written before it."""
    for _, seen in searched(graph_of(trace)):
        if not seen.covered:
            return True
        if not seen.harmless:
            return seen.origin is not None and _was_written_between(trace, seen.origin)
    return False


def doubt_in_words(trace: Trace) -> str:
    """What only the op trace can settle, where the run shows no failure; empty where there is nothing."""
    if not is_unsettled(trace):
        return ""
    zeros = trace.observed(GradientZeros)
    if zeros and not incidents(trace) and not doubtful_weights(trace):
        names = list(zeros[0].what.parameters)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"most of the float16 gradient of {names[0]}{more} is zero in {trace.moment(zeros[0].step)} and there is no loss scaler; only a "
            "backward pass with the loss multiplied can tell whether float16 has flushed it to zero"
        )
    return "something that only an op trace can settle was seen, and there is none"


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
    returned = [s for s, site in trace.measured() if (site.kind, site.root, site.fqn) == ("output", root, fqn)]
    return any(sample.finite and sample.call < before for sample in returned)


USUAL = frozenset({"float16", "bfloat16"})
"""Dtypes of quantization states that every dequantizer has a kernel for."""


def doubtful_weights(trace: Trace) -> bool:
    """Whether the packed weights of a model are worth comparing with what is multiplied, and were not.

    That is a model whose quantization states say something else than those of a model before it in the same process (which
    may have left a buffer of its dtype behind), or something that is no 16-bit dtype (for which a kernel may be missing).
    Its first call is compared.
    """
    before: set[str] = set()
    for root, dtypes in sorted(_states(trace).items()):
        if dtypes - USUAL or (before and not dtypes <= before):
            calls = (sample.call for sample, site in trace.measured() if (site.root, site.kind) == (root, "output"))
            call = next(calls, None)
            return call is not None and not any(seen.call == call for seen in trace.observed(PackedWeight))
        before |= dtypes
    return False


def _states(trace: Trace) -> dict[int, set[str]]:
    """The dtypes that the quantization states of each outermost module say."""
    states: dict[int, set[str]] = defaultdict(set)
    for note in trace.all(ParameterNote):
        if note.quant and note.quant.get("dtype"):
            states[note.root].add(str(note.quant["dtype"]))
    return states
