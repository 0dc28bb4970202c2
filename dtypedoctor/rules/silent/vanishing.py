"""``gradient-underflow`` and ``update-stall``: gradients and updates of weights that are rounded away."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod, sqrt

from dtypedoctor.diagnosis.incidents import incidents
from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import indexed, listed, module_of, percent, shown_line
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.rules import Statement, make_finding_of
from dtypedoctor.rules.nonfinite.rule import OPTIMIZER_EPSILON_UNDERFLOW
from dtypedoctor.trace.events import Observed, ParameterNote, ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import (
    FlushedGradient,
    GradientZeros,
    LostWrites,
    Overshoots,
    OvershotParameter,
    RoundedSum,
    ScaledBackward,
    ScaledGradient,
    StalledParameter,
    Updates,
)

GRADIENT_UNDERFLOW = FindingSpec(
    id="gradient-underflow",
    title="Gradients are flushed to zero in float16",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/huggingface/transformers/issues/25021",
        "https://github.com/google/gemma_pytorch/issues/24",
    ),
    remedies=("bfloat16",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    fits_wider_dtype=True,
    do_this="Use bfloat16 in the place of float16, or a GradScaler.",
    edits=("half-to-bfloat16",),
)

_SMALLEST = (
    f"The smallest positive float16 is {DTYPES['float16'].smallest:.2g}; what is below half of that becomes zero. A loss scaler multiplies "
    "the loss before the backward pass so that small gradients stay above it, and divides them in float32 afterwards."
)
REVIVED = 0.1
"""Share of a parameter's gradient that has to come back under a scaled loss."""


def detect_underflow(trace: Trace) -> Iterator[Finding]:
    """Float16 gradients that are zero, and are not when the loss is scaled."""
    seen = next(reversed(trace.observed(ScaledBackward)), None)
    if trace.all(ScalerState):
        return
    for flushed in trace.observed(FlushedGradient)[:1]:
        what = flushed.what
        statement = Statement(
            id="gradient-underflow",
            severity=Severity.WARNING,
            proven_by=f"multiplied by {what.scale:.3g} the same gradient is not zero in float16",
            summary=f"All gradients are zero: what comes back from the loss, up to {what.absmax:.2g}, is flushed to zero in float16, and there is no loss scaler.",
            cause=_SMALLEST,
            evidence=(
                f"Where the gradient of the loss becomes float16, none of {what.elements:,} elements is left.",
                f"Of the same gradient multiplied by {what.scale:.3g} there are {what.revived:,}.",
            ),
        )
        yield replace(make_finding_of(flushed, statement, dtype="float16", source=what.source), phase="backward")
    if seen is None or seen.what.error is not None:
        return
    revived = {name: one for name, one in seen.what.parameters.items() if _share_revived(one) >= REVIVED}
    if revived:
        yield _underflow(trace, seen, dict(sorted(revived.items(), key=lambda pair: -_share_revived(pair[1]))))


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _share_revived(one: ScaledGradient) -> float:
    return (one.zeros - one.zeros_scaled) / one.elements if one.elements else 0.0


def _underflow(trace: Trace, seen: Observed[ScaledBackward], revived: dict[str, ScaledGradient]) -> Finding:
    name, worst = next(iter(revived.items()))
    first = next(iter(trace.observed(GradientZeros)), None) or seen
    statement = Statement(
        id="gradient-underflow",
        severity=Severity.WARNING,
        proven_by=f"with {seen.what.of} multiplied by {seen.what.scale:g} the same backward pass gives gradients that are not zero",
        summary=_capital(
            f"{percent(worst.zeros / worst.elements)} of the gradient of {indexed(name)} is flushed to zero in float16: "
            "there is no loss scaler."
        ),
        cause=_SMALLEST,
        evidence=(
            *(
                f"{one}: {it.zeros} of {it.elements} elements are zero; with {seen.what.of} multiplied by "
                f"{seen.what.scale:g}, {it.zeros_scaled} are. The largest that came back is {it.largest:.3g}."
                for one, it in list(revived.items())[:3]
            ),
            f"Parameters with lost gradients: {listed(list(revived))}.",
        ),
    )
    return replace(make_finding_of(first, statement, dtype="float16"), fqn=module_of(name), phase="backward")


UPDATE_STALL = FindingSpec(
    id="update-stall",
    title="The optimizer's update is smaller than the weight can represent",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/pytorch/ao/pull/1124",
        "https://github.com/huggingface/trl/issues/7268",
        "https://github.com/meta-pytorch/torchtune/issues/2254",
    ),
    of_line="Keep the tensors that this line updates in float32.",
    do_this="Keep the trained parameters, and averages of them, in float32{cost}. To go on computing in bfloat16, wrap the forward pass: `with torch.autocast({device!r}, dtype=torch.bfloat16):`",
    partly_frozen=(
        "Keep only what trains in float32{cost}; frozen weights stay as they are. {before_optimizer} add the line below, and wrap the "
        + "forward pass: `with torch.autocast({device!r}, dtype=torch.bfloat16):`",
        "for p in {trained}: p.data = p.data.float() if p.requires_grad else p.data",
    ),
    edits=("updated-in-float32", "set-float32", "bfloat16-to-float32"),
)

STALLED = 0.95
"""Share of the updates, over all checked steps, that has to be lost."""
MOSTLY = 0.5
"""Share of all updates of an optimizer that has to be lost before its training stands still."""
ENOUGH = 8
"""Updates by which a parameter is judged."""
FEW = 3
"""Steps by which a parameter of few elements is judged, a temperature of one, say."""
NOISE = 4.0
"""Standard deviations of rounding below which the gradient of a sum is nothing else. Measured on the bias of attention's keys, which
is zero in exact arithmetic, in float16 and bfloat16: 0.06 to 0.25; on the biases of queries and values 50 and more."""

LASTING = 0.25
"""Share of itself by which what an optimizer keeps has to be off in the end: in a short training it may stand still."""
FEW_WEIGHTS = 0.05
"""Share of the trained weights below which those that stand still beside the others, norms' weights for the most part, are a note and no warning."""
SUMMED, STEADY = 16, 0.75
"""Elements of a parameter that is one number for many values, a bias of scores, say; and how much the signs of its gradients agree where they lead somewhere.
Measured on biases before a softmax: 0 to 0.6, once in 16 runs more; on a temperature that is trained: 1."""


def detect_stall(trace: Trace) -> Iterator[Finding]:
    """Parameters that stay where they are although the same steps move them in float64, where most of what is trained stands still."""
    return _stalls(trace, mostly=True)


def detect_partial_stall(trace: Trace) -> Iterator[Finding]:
    """The same of a few parameters beside others that move."""
    return _stalls(trace, mostly=False)


def _stalls(trace: Trace, *, mostly: bool) -> Iterator[Finding]:
    last = {o.what.optimizer: o for o in trace.observed(Updates)}
    for seen in last.values():
        named = seen.what.parameters.items()
        stalled = {name: one for name, one in named if _is_stalled(one) and not _is_rounding(trace, name, one)}
        if stalled and mostly is (seen.what.lost >= MOSTLY * seen.what.wanted):
            finding = _stall(seen, stalled, None if mostly else _share_of_trained(trace, stalled))
            yield replace(finding, source=_made_narrow_at(trace, stalled, finding.dtype))


def _made_narrow_at(trace: Trace, stalled: dict[str, StalledParameter], dtype: str | None) -> str | None:
    """The line of the program that gave the weights their dtype, which is the one to change; None where it is not known."""
    notes = [note for note in trace.all(ParameterNote) if note.name in stalled and note.dtype == dtype]
    return next((shown_line(note.set_at) for note in notes if note.set_at), None)


def _is_stalled(one: StalledParameter) -> bool:
    enough = min(ENOUGH, FEW * (one.elements if one.elements is not None else ENOUGH))
    return one.wanted >= enough and one.lost >= STALLED * one.wanted


def _is_rounding(trace: Trace, name: str, one: StalledParameter) -> bool:
    """Whether the gradients of a parameter that is added to each row are no larger than what rounding leaves of a sum that cancels.

    The bias of an attention's keys moves all scores of a query alike, and softmax does not see that. Where no module's output tells what was summed (a
    compiled or functional layer, a parameter of its own), few elements whose gradients change their signs from step to step count as rounding too.
    """
    gradients, noise = _gradients_and_noise(trace, name)
    known = [step for step, gradient in gradients.items() if gradient and noise.get(step)]
    if known:
        return sum(gradients[step] for step in known) <= NOISE * sum(noise[step] for step in known)
    few = one.elements is not None and one.elements <= SUMMED
    return few and one.steady is not None and one.steady < STEADY


def _gradients_and_noise(trace: Trace, name: str) -> tuple[dict[int, float], dict[int, float]]:
    """By step, the largest gradient of a vector ``name`` and the rounding of a sum over the rows of its module's output gradient."""
    gradients: dict[int, float] = {}
    noise: dict[int, float] = {}
    for sample, site in trace.measured():
        if not sample.finite:
            continue
        if site.kind == "grad" and site.fqn == name and len(site.shape) == 1:
            gradients[sample.step] = max(gradients.get(sample.step, 0.0), sample.absmax)
        elif site.kind == "grad_output" and site.fqn == module_of(name) and site.dtype in DTYPES:
            rows = prod(max(size, 1) for size in site.shape[:-1])
            rounding = DTYPES[site.dtype].epsilon * sqrt(rows) * sample.absmax
            noise[sample.step] = max(noise.get(sample.step, 0.0), rounding)
    return gradients, noise


def _share_of_trained(trace: Trace, stalled: dict[str, StalledParameter]) -> float | None:
    """The share of the trained weights that the stalled parameters hold; None where they are not among the parameters that were noted."""
    sizes = {note.name: prod(note.shape) for note in trace.all(ParameterNote) if note.requires_grad and not note.buffer}
    held = sum(sizes.get(name, 0) for name in stalled)
    return held / sum(sizes.values()) if held and stalled.keys() <= sizes.keys() else None


def _parameters(count: int) -> str:
    return "1 parameter" if count == 1 else f"{count:,} parameters"


def _what_stands_still(what: Updates, stalled: dict[str, StalledParameter], dtype: str) -> str:
    """How many weights are what they were before training, which nobody sees who only watches the loss; of older traces, how many updates are lost."""
    names = listed(list(stalled))
    lost, wanted = sum(one.lost for one in stalled.values()), sum(one.wanted for one in stalled.values())
    share = percent(lost / wanted)
    asked, still = sum(one.asked for one in stalled.values()), sum(one.still for one in stalled.values())
    many = sum(one.parameters for one in stalled.values())
    names = f"{len(stalled)} names: {names}" if many > len(stalled) > 1 else names
    if asked and what.checks > 1:
        return _capital(
            f"{percent(still / asked)} of the weights in {_parameters(many)} ({names}) are unchanged after {what.checks} optimizer steps: "
            f"{dtype} rounds {share} of their updates away."
        )
    verb, whose = ("is", "its") if many == 1 else ("are", "their")
    return f"{_parameters(many)} {verb} not training: {dtype} rounds away {share} of {whose} updates ({names})."


def _measured_of(what: Updates) -> Iterator[str]:
    """That most parameters could not be measured because their values or gradients are inf or NaN, where that is so."""
    if what.finite < what.compared:
        yield f"Measured only where values and gradients are finite: {what.finite} of {what.compared} parameters."


def _when_compared(last: int) -> str:
    """Which steps were checked: the first four, then each power of two."""
    if last <= 4:
        return "in step 1" if last == 1 else f"in steps 1 to {last}"
    return f"in steps 1 to 4 and each power of two up to {last}"


def _stall(seen: Observed[Updates], stalled: dict[str, StalledParameter], share: float | None) -> Finding:
    """The finding; ``share`` of the trained weights stands still beside others that move, None where most do or that is not known."""
    what = seen.what
    few = share is not None and share < FEW_WEIGHTS
    beside = f" They are {percent(share)} of the trained weights." if share is not None else ""
    name, worst = next(iter(stalled.items()))
    epsilon = DTYPES[worst.dtype].epsilon
    statement = Statement(
        id="update-stall",
        severity=Severity.INFO if few else Severity.WARNING,
        proven_by=f"the operators of the same {what.optimizer} steps move it in float64",
        summary=_what_stands_still(what, stalled, worst.dtype) + beside,
        cause=(
            f"Near 1 the spacing of {worst.dtype} numbers is {epsilon:.3g}, and in proportion elsewhere. An update below half "
            "of the spacing is rounded away, each time, without adding up."
            + (
                " The other parameters train; these keep their first values, as if they were frozen."
                if share is not None
                else ""
            )
        ),
        evidence=(
            *(
                f"{one} ({it.dtype}, magnitudes up to {it.absmax:.3g}): {it.lost} of {it.wanted} updates lost; the "
                f"largest update in float64 is {it.update:.3g}."
                for one, it in list(stalled.items())[:3]
            ),
            (
                f"The operators of {what.optimizer} (learning rate {what.lr:g}) were applied to float64 values, too, compared "
                f"{_when_compared(what.checks)}."
            ),
            *_measured_of(what),
            (
                f"Parameters that stall: {listed(list(stalled))}. Of the updates of all parameters together "
                f"{percent(what.lost / what.wanted)} are lost."
            ),
        ),
    )
    found = make_finding_of(seen, statement, dtype=worst.dtype)
    return replace(found, fqn=module_of(name), phase="optimizer", step=what.first_step)


def detect_lost_writes(trace: Trace) -> Iterator[Finding]:
    """Lines that update tensors and leave them as they are: a step by hand, a moving average, what an optimizer keeps beside its parameters."""
    seen = trace.observed(LostWrites)
    first, last = ({(one.what.source, one.what.optimizer): one for one in each} for each in (reversed(seen), seen))
    for (source, optimizer), when in first.items():
        what = last[source, optimizer].what
        if not what.tensors:
            continue  # they have moved in the end
        if what.optimizer and (incidents(trace) or trace.observed(Overshoots)):
            continue  # of what state that is rounded away has come to, others tell
        yield make_finding_of(when, _lost_writes(what), dtype=what.dtype, source=source or None)


def _lost_writes(what: LostWrites) -> Statement:
    epsilon = DTYPES[what.dtype].epsilon
    tensors = "1 tensor" if what.tensors == 1 else f"{what.tensors:,} tensors"
    where = f" of the state of {what.optimizer}" if what.optimizer else " in place" if what.in_place else ""
    return Statement(
        id="update-stall",
        severity=Severity.INFO if what.optimizer and not what.narrower and what.way < LASTING else Severity.WARNING,
        summary=f"{what.source or 'A line outside of modules'} updates {tensors}{where}, and {what.dtype} rounds {percent(what.lost / what.wanted)} of that away.",
        cause=(
            f"Near 1 the spacing of {what.dtype} numbers is {epsilon:.3g}, and in proportion elsewhere. An update below half "
            "of the spacing is rounded away, each time, without adding up. This holds "
            "for parameters that the script steps by itself, for a moving average of them, and for an adapter that is merged into them."
        ),
        evidence=(
            (
                f"{what.tensors} of {what.compared} {what.dtype} tensors that this line updates stay as they are{' in most elements' if what.lost < what.wanted else ''} (magnitudes up to {what.absmax:.3g})."
            ),
            "The same operators change them in float64, and no other tensor keeps what is lost, as in Kahan summation.",
            (
                f"From one comparison to the next, which may be several updates later, float64 moves {what.wanted:,} of the elements compared, by up to "
                f"{what.change:.3g}; {what.lost:,} of these did not move."
            ),
            *(
                (f"At that rate all steps would move them by {percent(what.way)} of themselves.",)
                if what.way >= LASTING
                else ()
            ),
        ),
    )


_IN_PLACE = "The sum is a tensor that is written to, so it keeps its dtype whatever is added"


def _of_gradients(finding: Finding) -> str:
    """What to do where it is autograd that adds up; empty for all else."""
    if finding.phase != "backward" or _IN_PLACE not in finding.cause:
        return ""
    return (
        "Have float32 gradients: keep the parameters in float32 and compute under autocast, or add `p.grad.float()` up in tensors of your own, with "
        "`zero_grad()` after each backward pass."
    )


ROUNDED_SUM = FindingSpec(
    id="rounded-sum",
    title="A running sum in half precision loses what is added to it",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/pytorch/xla/pull/2425", "https://github.com/pytorch/executorch/pull/20089"),
    do_this=(
        "Make the sum float32 where it is made: the dtype of its tensor, a buffer again after `.half()` or `.to(dtype)`, or its first term, "
        "`total = total + x.float()`; a cast of what is added changes nothing where the sum is a half-precision tensor that is written to."
    ),
    instead=_of_gradients,
    edits=("updated-in-float32", "in-wider-dtype", "half-to-float32", "bfloat16-to-float32"),
)


def detect_rounded_sums(trace: Trace) -> Iterator[Finding]:
    """Sums that are built up one addition at a time until what is added is below their spacing."""
    seen = trace.observed(RoundedSum)
    first, last = {one.what.source: one for one in reversed(seen)}, {one.what.source: one for one in seen}
    for source, when in first.items():
        what = last[source].what
        yield make_finding_of(when, _rounded_sum(what), dtype=what.dtype, source=source or None)


def _rounded_sum(what: RoundedSum) -> Statement:
    epsilon = DTYPES[what.dtype].epsilon
    where = f"{what.source or 'A line outside of modules'} adds to a sum in {what.dtype}"
    if what.begins is None:
        followed = f"{where} {what.added:,} times and gets {what.value:,.6g}; in float64 it is {what.exact:,.6g}."
    else:  # between looks nobody counts
        followed = (
            f"{where}: the last {what.added:,} additions that were followed take it from {what.begins:,.6g} to {what.value:,.6g}, "
            f"in float64 to {what.exact:,.6g}."
        )
    return Statement(
        id="rounded-sum",
        severity=Severity.WARNING,
        proven_by="the same terms added in float64 give another sum",
        summary=followed,
        cause=(
            f"The spacing of {what.dtype} numbers is {epsilon:.3g} of their magnitude. What is added to a sum is rounded to it, and below half of it nothing is "
            f"added at all: a count of ones ends at 256 in bfloat16 and at 2,048 in float16.{f' {_IN_PLACE}.' if what.in_place else ''}"
        ),
        evidence=(f"Followed in float64 through {what.added:,} additions: off by {what.error:,.3g}.",),
    )


def detect_overshoot(trace: Trace) -> Iterator[Finding]:
    """Steps that move parameters many times as far as in float32: the second moment that they are divided by rounds to zero."""
    for seen in trace.observed(Overshoots):
        name, worst = next(iter(seen.what.parameters.items()))
        still = [one.what for one in trace.observed(LostWrites) if one.what.optimizer == seen.what.optimizer]
        line = still[-1].source if still and still[-1].tensors else None
        found = make_finding_of(seen, _overshoot(seen.what, name, worst), dtype=worst.dtype, source=line or None)
        yield replace(found, fqn=module_of(name), phase="optimizer")


def _overshoot(what: Overshoots, name: str, worst: OvershotParameter) -> Statement:
    smallest = DTYPES[worst.dtype].smallest
    return Statement(
        id="optimizer-epsilon-underflow",
        proven_by=f"the operators of the same {what.optimizer} steps, with its state, move these elements at most {worst.update:.3g} in float64",
        summary=(
            f"{what.optimizer} moves elements of {indexed(name)} by up to {worst.moved:.3g}, in float64 it moves them at most "
            f"{worst.update:.3g}: what it divides by rounds to zero in {worst.dtype}."
        ),
        cause=(
            f"The optimizer keeps its state in the parameters' dtype. The smallest positive {worst.dtype} is {smallest:.3g}: the second "
            "moment, a mean of squared gradients, is rounded to zero, and what is divided by it becomes far too large. Everything stays finite."
        ),
        evidence=(
            *(
                f"{one} ({it.dtype}): {it.overshot} of {it.elements} compared elements move more than 16 times as far as in float64, up to {it.moved:.3g}."
                for one, it in list(what.parameters.items())[:3]
            ),
            f"The operators of {what.optimizer} (learning rate {what.lr:g}) were applied to float64 values, too, from the first step on.",
            f"Parameters moved too far: {len(what.parameters)} of {what.compared} compared ({listed(list(what.parameters))}).",
        ),
    )


RULES = (
    Rule(name="gradient-underflow", priority=150, specs=(GRADIENT_UNDERFLOW,), detect=detect_underflow),
    Rule(name="update-stall", priority=160, specs=(UPDATE_STALL,), detect=detect_stall),
    Rule(name="partial-stall", priority=200, specs=(UPDATE_STALL,), detect=detect_partial_stall),
    Rule(name="lost-writes", specs=(UPDATE_STALL,), detect=detect_lost_writes),
    Rule(name="rounded-sums", specs=(ROUNDED_SUM,), detect=detect_rounded_sums),
    Rule(name="step-overshoots", specs=(OPTIMIZER_EPSILON_UNDERFLOW,), detect=detect_overshoot),
)
