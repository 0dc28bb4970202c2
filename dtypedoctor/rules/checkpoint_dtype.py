"""``checkpoint-dtype-mismatch``: a model in another dtype than its checkpoint or the request says, loaded or about to be."""

from collections import Counter
from collections.abc import Iterator, Mapping

from dtypedoctor.diagnosis.checkpoint import Subject, plain_dtype
from dtypedoctor.diagnosis.rule import COMPILE_AND_LOAD, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import limit_of, listed, number
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.text import counted
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import (
    MomentsStoredInHalf,
    OptimizerStateCast,
    Pretrained,
    RoundedAndTrained,
    StateLoaded,
)

SPEC = FindingSpec(
    id="checkpoint-dtype-mismatch",
    title="The model was loaded in another dtype than the checkpoint or the request says",
    family=COMPILE_AND_LOAD,
    severity=Severity.WARNING,
    references=(
        "https://github.com/huggingface/transformers/pull/34919",
        "https://github.com/huggingface/transformers/issues/23357",
    ),
    do_this="Load the checkpoint in the dtype that it is stored in, or in float32.",
    edits=("half-to-bfloat16", "bfloat16-to-float32"),
)

LOST = 1e-3
"""Share of elements that a cast may turn into zero without a word."""
_COMPARED = "the dtypes before and after loading were compared"
NATIVE_RANGE = "bfloat16"
"""A checkpoint in this dtype may hold anything that float32 can, and was never tried in float16."""


def detect_loading(trace: Trace) -> Iterator[Finding]:
    """What loading did to the dtypes of the weights."""
    for model in trace.observed(Pretrained):
        yield from _pretrained(model.what)
    for state in trace.observed(StateLoaded):
        yield from _state(state.what)
    for trained in trace.observed(RoundedAndTrained):
        yield _trained(trained.what)
    for moments in trace.observed(MomentsStoredInHalf):
        yield from _moments(moments.what)
    for cast in trace.observed(OptimizerStateCast):
        # torch casts the state to the dtype of the parameters, whatever dtype the optimizer keeps it in.
        casts, stored, dtype = _casts(cast.what.casts)
        yield _finding(
            f"Optimizer.load_state_dict cast {listed(cast.what.keys)} of {cast.what.optimizer} from {casts}, and it steps with that.",
            (
                f"torch casts the state of an optimizer to the dtype of its parameters. The checkpoint holds {stored} state; {dtype} keeps "
                f"{_BITS.get(dtype, 'fewer')} bits of each value, and a slow mean (beta 0.99 or more) in it stands still. Set the {stored} tensors in "
                "optimizer.state again after load_state_dict, or override it as bitsandbytes does."
            ),
            (
                f"{cast.what.rounded:,} of {cast.what.compared:,} elements that were compared were rounded.",
                f"State of {cast.what.parameters} parameters.",
            ),
            dtype,
            source=cast.what.source,
        )


def _pretrained(what: Pretrained) -> Iterator[Finding]:
    stored, loaded = (max(census, key=lambda dtype: census[dtype]) for census in (what.stored, what.loaded))
    requested = what.requested
    if requested is not None and requested != loaded and requested in ("float16", "bfloat16", "float32"):
        summary = f"{what.model} was requested in {requested} and is {loaded}."
        cause = "The request did not reach the model, or only a part of it; no error is raised."
    elif stored == NATIVE_RANGE and loaded == "float16":
        summary = f"{what.model} is stored in bfloat16 and was loaded in float16, whose largest value is {number(limit_of(loaded))}."
        cause = (
            "A bfloat16 checkpoint has weights and makes activations that never had to fit into float16. The cast itself is "
            "silent: what is too large becomes inf, what is below 6e-8 becomes zero."
        )
    else:
        return
    census_in_words = (
        ", ".join(f"{count} elements {dtype}" for dtype, count in census.items())
        for census in (what.stored, what.loaded)
    )
    asked = requested or "nothing (the default decides)"
    yield _finding(
        summary,
        cause,
        ("Stored: {}. Loaded: {}. Requested: {}.".format(*census_in_words, asked),),
        loaded,
        source=what.source,
    )


def _state(what: StateLoaded) -> Iterator[Finding]:
    if not what.became_inf and what.became_zero <= LOST * max(1, what.elements):
        return
    casts, _, dtype = _casts(what.casts)
    yield _finding(
        f"load_state_dict cast {casts} and lost {what.became_inf + what.became_zero} of {what.elements} elements.",
        (
            "load_state_dict copies into the tensors that are there, whatever the file holds. In a narrower dtype values that are "
            "too large become inf and those that are too small zero, without a word."
        ),
        (
            f"{what.became_inf} elements became inf and {what.became_zero} became zero.",
            f"Tensors that were cast to a smaller range: {listed(what.names)}.",
        ),
        dtype,
        source=what.source,
    )


def _trained(what: RoundedAndTrained) -> Finding:
    """Bits of a checkpoint are gone, and what is trained has no room for them: the run does not go on where the last one ended."""
    casts, stored, dtype = _casts(what.casts)
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
        source=what.source,
    )


def _moments(what: MomentsStoredInHalf) -> Iterator[Finding]:
    if not what.became_inf and what.became_zero <= LOST * what.compared:
        return
    keys = listed(what.keys)
    least = "at least " if what.became_zero else ""  # of one whose mean of the gradients is 0, too, nobody knows
    yield _finding(
        (
            f"{what.optimizer} goes on with {keys} that was stored in float16: {least}{what.became_zero:,} of {what.compared:,} elements "
            f"were rounded to 0 and {what.became_inf:,} became inf."
        ),
        (
            f"{keys} is a mean of squared gradients. What is below 6e-8 becomes 0 in float16, what is above 65,504 inf, and loading it into "
            f"float32 does not bring it back. {what.optimizer} divides by its square root: a weight whose second moment is 0 moves much too far, "
            "one whose second moment is inf no longer moves. Save the state of an optimizer in float32."
        ),
        (
            f"{what.became_zero:,} elements are 0 although a mean of the same gradients is not; every other value is exact in float16.",
            f"State of {what.parameters} parameters, of which {what.compared:,} elements were compared before the first step after loading.",
        ),
        "float16",
        source=what.source,
        proven_by="a mean of squares is 0 only if the mean of the same gradients is 0 as well",
    )


_BITS = {"bfloat16": "8", "float16": "11"}


def _casts(casts: Mapping[str, int]) -> tuple[str, str, str]:
    """All casts in words, and the dtypes of the first, from and to."""
    stored, _, dtype = next(iter(casts)).partition("->")
    return ", ".join(name.replace("->", " to ") for name in casts), stored, dtype


def _finding(summary: str, cause: str, evidence: tuple[str, ...], dtype: str, *,
             source: str | None = None, severity: Severity = Severity.WARNING, proven_by: str | None = _COMPARED) -> Finding:  # fmt: skip
    statement = Statement(
        id=SPEC.id, severity=severity, proven_by=proven_by, summary=summary, cause=cause, evidence=evidence
    )
    return make_finding(statement, phase="static", dtype=dtype, source=source)


def check_configured(subject: Subject) -> Iterator[Finding]:
    """What is stored against what the config says, the config against its own parts, what is stored against the request."""
    stored, configured = subject.stored_dtype, subject.config_dtype
    if subject.loaded or stored is None:
        return
    tensors = Counter(tensor.dtype for tensor in subject.floating)
    counts = ", ".join(f"{count} tensor(s) in {dtype}" for dtype, count in tensors.most_common())
    if configured is not None and configured != stored:
        harm = _HARM.get((stored, configured), ", and half of their bits are lost" if stored == "float32" else "")
        yield _finding(
            f"The files hold {stored} weights and the config says {configured}.",
            f"Who loads without naming a dtype gets {configured}: the weights are cast in silence{harm}.",
            (f"Stored: {counts}.", f"config: dtype is {configured}."),
            configured,
            proven_by=None,
        )
    for name, part in subject.config.items():
        other = plain_dtype(part.get("dtype") or part.get("torch_dtype")) if isinstance(part, dict) else None
        if other is not None and configured is not None and other != configured:
            yield _finding(
                f"{name} says {other} and the config as a whole {configured}.",
                "Which of them wins depends on the version of the library and on how the model is loaded.",
                (f"dtype is {configured}; {name}.dtype is {other}.",),
                other,
                severity=Severity.INFO,
                proven_by=None,
            )
    beyond = {name: large for name, (large, *_) in subject.outside_float16.items() if large}
    nonfinite = {name: bad for name, (*_, bad) in subject.outside_float16.items() if bad}
    if nonfinite:
        yield _finding(
            f"{counted(sum(nonfinite.values()), 'weight')} of the files are inf or NaN: {listed(list(nonfinite))}.",
            "They were stored so: no dtype that the checkpoint is loaded in makes them finite.",
            (f"Stored: {counts}.",),
            stored,
            proven_by="the values in the files were read",
        )
    if subject.intent.dtype == "float16" and (stored == NATIVE_RANGE or beyond):
        lost = f"{counted(sum(beyond.values()), 'weight')} beyond float16's range: {listed(list(beyond))}"
        small = sum(small for _, small, _ in subject.outside_float16.values())
        yield _finding(
            f"{lost}; the checkpoint is {stored}."
            if beyond
            else f"A {stored} checkpoint is loaded as float16, which has a smaller range.",
            f"Weights and, more often, activations that {stored} holds become inf in float16 above 65504.",
            (
                f"Stored: {counts}.",
                "It is to be loaded as float16.",
                f"Weights below 3e-08, which become 0: {small:,}.",
            ),
            "float16",
            proven_by=None,
        )


_HARM = {
    ("bfloat16", "float16"): ", and values above 65504 become inf",
    ("float16", "bfloat16"): ", and 3 bits of each are lost for good",
}


RULES = (
    Rule(name="loading", priority=220, specs=(SPEC,), detect=detect_loading),
    Rule(name="loaded-dtype", priority=230, specs=(SPEC,), inspect=check_configured),
)
