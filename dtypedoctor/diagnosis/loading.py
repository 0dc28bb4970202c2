"""``checkpoint-dtype-mismatch``: a model that was loaded in another dtype than its file or the request says."""

from collections.abc import Iterator, Mapping

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import limit_of, listed
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.models import Pretrained, RoundedAndTrained, StateLoaded

LOST = 1e-3
"""Share of elements that a cast may turn into zero without a word."""
NATIVE_RANGE = "bfloat16"
"""A checkpoint in this dtype may hold anything that float32 can, and was never tried in float16."""


def detect_loading(trace: Trace) -> Iterator[Finding]:
    """What loading did to the dtypes of the weights."""
    for model in trace.observed(Pretrained):
        yield from _pretrained(model)
    for state in trace.observed(StateLoaded):
        yield from _state(state)
    for trained in trace.observed(RoundedAndTrained):
        yield _trained(trained)


def _pretrained(seen: Observed[Pretrained]) -> Iterator[Finding]:
    what = seen.what
    stored, loaded, requested = _main(what.stored), _main(what.loaded), what.requested
    if requested is not None and requested != loaded and requested in ("float16", "bfloat16", "float32"):
        summary = f"{what.model} was asked for in {requested} and is {loaded}."
        cause = "The request did not reach the model, or not all of it; nothing says so."
    elif stored == NATIVE_RANGE and loaded == "float16":
        summary = (
            f"{what.model} is stored in bfloat16 and was loaded in float16, whose range ends at {limit_of(loaded):.6g}."
        )
        cause = (
            "A bfloat16 checkpoint has weights and makes activations that never had to fit into float16. The cast itself is "
            "silent: what is too large becomes inf, what is below 6e-8 becomes zero."
        )
    else:
        return
    asked = requested or "nothing (the default decides)"
    evidence = (f"Stored: {_census(what.stored)}. Loaded: {_census(what.loaded)}. Asked for: {asked}.",)
    yield _finding(summary, cause, evidence, loaded)


def _state(seen: Observed[StateLoaded]) -> Iterator[Finding]:
    what = seen.what
    lost = what.became_inf + what.became_zero
    if not what.became_inf and what.became_zero <= LOST * max(1, what.elements):
        return
    casts = ", ".join(name.replace("->", " to ") for name in what.casts)
    yield _finding(
        f"load_state_dict cast {casts} and lost {lost} of {what.elements} elements.",
        (
            "load_state_dict copies into the tensors that are there, whatever the file holds. In a narrower dtype values that are "
            "too large become inf and those that are too small zero, without a word."
        ),
        (
            f"{what.became_inf} elements became inf and {what.became_zero} became zero.",
            f"Tensors that were cast to a smaller range: {listed(what.names)}.",
        ),
        next(iter(what.casts)).partition("->")[2],
    )


def _trained(seen: Observed[RoundedAndTrained]) -> Finding:
    """Bits of a checkpoint are gone, and what is trained has no room for them: the run does not go on where the last one ended."""
    what = seen.what
    casts = ", ".join(name.replace("->", " to ") for name in what.casts)
    stored, dtype = next(iter(what.casts)).split("->")
    return _finding(
        f"load_state_dict cast {casts}, and {what.parameters} parameters that lost bits by it are trained in {dtype}.",
        (
            f"load_state_dict copies into the tensors that are there. The checkpoint holds {stored} values; the {dtype} parameters that "
            f"the optimizer steps on keep {_BITS.get(dtype, 'fewer')} bits of each, and an update that is smaller than a bit is lost as well. "
            f"Build the model in {stored} and use autocast, or keep {stored} master weights."
        ),
        (
            f"{what.rounded:,} of {what.elements:,} elements were rounded, by {what.mean_change:.2g} of their value in the mean.",
            f"In the optimizer: {listed(what.names)}.",
        ),
        dtype,
    )


_BITS = {"bfloat16": "8", "float16": "11"}


def _finding(summary: str, cause: str, evidence: tuple[str, ...], dtype: str) -> Finding:
    said = Statement(
        id="checkpoint-dtype-mismatch",
        severity=Severity.WARNING,
        proven_by="the dtypes before and after loading were compared",
        summary=summary,
        cause=cause,
        evidence=evidence,
    )
    return located(said, phase="static", dtype=dtype)


def _main(census: Mapping[str, int]) -> str:
    """The dtype of most elements."""
    return max(census, key=lambda dtype: census[dtype])


def _census(census: Mapping[str, int]) -> str:
    return ", ".join(f"{count} elements {dtype}" for dtype, count in census.items())
