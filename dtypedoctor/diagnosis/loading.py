"""``checkpoint-dtype-mismatch``: a model that was loaded in another dtype than its file or the request says."""

from collections.abc import Iterator, Mapping

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.observations import observed
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import limit_of, listed
from dtypedoctor.trace.events import Observation
from dtypedoctor.trace.reader import Trace

LOST = 1e-3
"""Share of elements that a cast may turn into zero without a word."""
NATIVE_RANGE = "bfloat16"
"""A checkpoint in this dtype may hold anything that float32 can, and was never tried in float16."""


def detect_loading(trace: Trace) -> Iterator[Finding]:
    """What loading did to the dtypes of the weights."""
    for seen in observed(trace, "pretrained"):
        yield from _pretrained(seen)
    for seen in observed(trace, "state-loaded"):
        yield from _state(seen)
    for seen in observed(trace, "rounded-and-trained"):
        yield _trained(seen)


def _pretrained(seen: Observation) -> Iterator[Finding]:
    values = seen.values
    stored, loaded, requested = _main(values["stored"]), _main(values["loaded"]), values["requested"]
    if requested is not None and requested != loaded and requested in ("float16", "bfloat16", "float32"):
        summary = f"{values['model']} was asked for in {requested} and is {loaded}."
        cause = "The request did not reach the model, or not all of it; nothing says so."
    elif stored == NATIVE_RANGE and loaded == "float16":
        summary = f"{values['model']} is stored in bfloat16 and was loaded in float16, whose range ends at {limit_of(loaded):.6g}."
        cause = (
            "A bfloat16 checkpoint has weights and makes activations that never had to fit into float16. The cast itself is "
            "silent: what is too large becomes inf, what is below 6e-8 becomes zero."
        )
    else:
        return
    asked = requested or "nothing (the default decides)"
    evidence = (f"Stored: {_census(values['stored'])}. Loaded: {_census(values['loaded'])}. Asked for: {asked}.",)
    yield _finding(summary, cause, evidence, loaded)


def _state(seen: Observation) -> Iterator[Finding]:
    values = seen.values
    lost = values["became_inf"] + values["became_zero"]
    if not values["became_inf"] and values["became_zero"] <= LOST * max(1, values["elements"]):
        return
    casts = ", ".join(name.replace("->", " to ") for name in values["casts"])
    yield _finding(
        f"load_state_dict cast {casts} and lost {lost} of {values['elements']} elements.",
        (
            "load_state_dict copies into the tensors that are there, whatever the file holds. In a narrower dtype values that are "
            "too large become inf and those that are too small zero, without a word."
        ),
        (
            f"{values['became_inf']} elements became inf and {values['became_zero']} became zero.",
            f"Tensors that were cast to a smaller range: {listed(values['names'])}.",
        ),
        next(iter(values["casts"])).partition("->")[2],
    )


def _trained(seen: Observation) -> Finding:
    """Bits of a checkpoint are gone, and what is trained has no room for them: the run does not go on where the last one ended."""
    values = seen.values
    casts = ", ".join(name.replace("->", " to ") for name in values["casts"])
    stored, dtype = next(iter(values["casts"])).split("->")
    return _finding(
        f"load_state_dict cast {casts}, and {values['parameters']} parameters that lost bits by it are trained in {dtype}.",
        (
            f"load_state_dict copies into the tensors that are there. The checkpoint holds {stored} values; the {dtype} parameters that "
            f"the optimizer steps on keep {_BITS.get(dtype, 'fewer')} bits of each, and an update that is smaller than a bit is lost as well. "
            f"Build the model in {stored} and use autocast, or keep {stored} master weights."
        ),
        (
            f"{values['rounded']:,} of {values['elements']:,} elements were rounded, by {values['mean_change']:.2g} of their value in the mean.",
            f"In the optimizer: {listed(values['names'])}.",
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
