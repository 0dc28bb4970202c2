"""Packed weights that may be dequantised wrongly without anything complaining."""

from collections import defaultdict

from dtypedoctor.scenario.request import Window
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.packed import PackedWeight

__all__ = ["doubtful_weights"]

USUAL = frozenset({"float16", "bfloat16"})
"""Dtypes of quantisation states that every dequantiser has a kernel for."""


def doubtful_weights(trace: Trace) -> Window | None:
    """The first call of a model whose packed weights are worth comparing with what is multiplied.

    That is a model whose quantisation states say something else than those of a model before it in the same process (which
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
    """The dtypes that the quantisation states of each outermost module say."""
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
