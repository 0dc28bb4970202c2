"""A gradient scaler that raises, that finds no scale, or that would raise: float16 gradients, no gradients at all, a scale that never fits."""

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile

from dtypedoctor.diagnosis.checkpoint import StaticTensor, Subject
from dtypedoctor.diagnosis.incidents import never_stepped, unsettled
from dtypedoctor.diagnosis.rule import LOSS_SCALING, OF_ANY_FINDING, Confidence, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import how_the_run_ended, listed, module_of, raising_line, rejection_in
from dtypedoctor.dtypes import HALF
from dtypedoctor.rules import Statement, make_finding, make_finding_of
from dtypedoctor.trace.events import Raised, ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import Unscaled
from dtypedoctor.trace.records.silent import CLIPPED, TWICE, ScaledUse

UNSCALE_FLOAT16_GRADIENTS = FindingSpec(
    id="unscale-float16-gradients",
    title="A gradient scaler is used with trainable parameters in float16",
    family=LOSS_SCALING,
    references=(
        "https://github.com/huggingface/transformers/issues/23165",
        "https://github.com/huggingface/peft/issues/1249",
    ),
    do_this="Train in bfloat16 without a gradient scaler, or keep the trained parameters in float32 under float16 autocast.",
    edits=("half-to-bfloat16",),
)
SCALER_BFLOAT16 = FindingSpec(
    id="scaler-bfloat16",
    title="A gradient scaler is used with trainable parameters in bfloat16",
    family=LOSS_SCALING,
    references=("https://github.com/pytorch/pytorch/issues/127176",),
    do_this="Remove the GradScaler: bfloat16 needs none.",
    edits=("without-scaler",),
)
NO_INF_CHECKS = FindingSpec(
    id="no-inf-checks",
    title="The optimizer's parameters have no gradients",
    family=LOSS_SCALING,
    references=(
        "https://github.com/huggingface/accelerate/issues/328",
        "https://github.com/huggingface/transformers/issues/24003",
    ),
    do_this="Make the optimizer after the model has its final form, and step only optimizers whose parameters the loss depends on.",
    edits=("optimizer-after-model", "step-where-gradients"),
)
LOSS_SCALE_EXHAUSTED = FindingSpec(
    id="loss-scale-exhausted",
    title="The loss scale keeps halving because every step overflows",
    family=LOSS_SCALING,
    references=("https://github.com/deepspeedai/DeepSpeed/issues/5426",),
    ablations=(*OF_ANY_FINDING, "loss-scale-one"),
    do_this="Use bfloat16, which needs no loss scale.",
    edits=("half-to-bfloat16",),
)

SCALED_GRADIENTS = FindingSpec(
    id="scaled-gradients",
    title="Gradients are used while the loss scale is still on them",
    family=LOSS_SCALING,
    severity=Severity.WARNING,
    references=(
        "https://github.com/pytorch/examples/issues/1196",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/9599",
    ),
    do_this="Scale the loss once; call `scaler.unscale_(optimizer)` before gradients are clipped; step by `scaler.step(optimizer)`.",
)


FLOAT16_GRADIENTS = "Attempting to unscale FP16 gradients"
NOTHING_CHECKED = "No inf checks were recorded for this optimizer"
_BFLOAT16_REJECTED = re.compile(r"_amp_foreach_non_finite_check_and_unscale.*BFloat16")
AT_MINIMUM = "loss scale already at minimum"

UNKNOWN = Unscaled(scale=1.0, params={}, gradients={}, names={})
"""Stands for an optimizer of which nothing was told."""


def detect_scaling(trace: Trace) -> Iterator[Finding]:
    """What goes wrong between a gradient scaler and the parameters that it serves."""
    seen = [seen.what for seen in trace.observed(Unscaled)]
    last = next(reversed(seen), UNKNOWN)
    bfloat16 = [unscaled for unscaled in seen if unscaled.gradients.get("bfloat16")]
    raised, rejected = rejection_in(trace), None
    if raised is not None:
        if FLOAT16_GRADIENTS in raised.message:
            yield _float16_gradients(trace, raised, last)
        if NOTHING_CHECKED in raised.message:
            yield _nothing_checked(trace, raised, last)
        rejected = raised if _BFLOAT16_REJECTED.search(raised.message) else None
    if rejected or bfloat16:
        yield _bfloat16_gradients(trace, rejected, next(iter(bfloat16), UNKNOWN))


def _float16_gradients(trace: Trace, raised: Raised, last: Unscaled) -> Finding:
    names, params = last.names.get("float16", []), last.params
    owners = list(dict.fromkeys(module_of(name) for name in names))
    few = bool(owners) and params.get("float16", 0) < sum(params.values())
    statement = Statement(
        id="unscale-float16-gradients",
        summary=f"GradScaler.unscale_() was called on float16 gradients ({listed(names) or 'names unknown'}).",
        cause=(
            "A scaler multiplies the loss so that float16 gradients do not vanish, and divides float32 gradients by the same "
            "number. Trainable parameters in float16 have float16 gradients, in which the quotient would be lost. Keep what is "
            "trained in float32 and let autocast make the float16 copies."
            + (" peft casts its adapters to float32, but not the copies of `modules_to_save`." if few else "")
        ),
        evidence=(
            *((f"The optimizer holds {_counted(params)} parameters.",) if params else ()),
            *how_the_run_ended(trace),
        ),
    )
    return make_finding(
        statement,
        phase="optimizer",
        step=raised.step,
        fqn=owners[0] if few else "",
        dtype="float16",
        source=raising_line(raised),
    )


def _nothing_checked(trace: Trace, raised: Raised, last: Unscaled) -> Finding:
    params, strangers, frozen = last.params, last.strangers, last.frozen
    count = sum(params.values())
    if strangers:
        why = (
            f"{strangers} of its {count} parameters belong to no module that was called: the optimizer was made before the "
            "model was changed (a layer replaced, the model copied or moved), or for another model."
        )
    elif count and frozen == count:
        why = "All its parameters are frozen."
    else:
        why = "Its parameters are in the model and trainable, but the loss does not depend on them (no_grad, detach)."
    statement = Statement(
        id="no-inf-checks",
        summary="The scaler steps an optimizer none of whose parameters has a gradient.",
        cause=f"The scaler looks for inf in the gradients of the optimizer's parameters and found no gradient at all. {why}",
        evidence=(
            *((f"{last.optimizer} holds {_counted(params)} parameters; gradients: 0.",) if params else ()),
            *((f"{strangers} of them are in no module that was called.",) if strangers else ()),
            *((f"{frozen} of them do not require a gradient.",) if frozen else ()),
            *how_the_run_ended(trace),
        ),
    )
    return make_finding(statement, phase="optimizer", step=raised.step, source=raising_line(raised))


def _bfloat16_gradients(trace: Trace, refused: Raised | None, served: Unscaled) -> Finding:
    names = served.names.get("bfloat16", [])
    statement = Statement(
        id="scaler-bfloat16",
        severity=Severity.ERROR if refused is not None else Severity.WARNING,
        summary="GradScaler is used with bfloat16 parameters: unnecessary, and unsupported on CUDA.",
        cause=(
            "bfloat16 has the range of float32, so its gradients do not underflow and scaling the loss gains nothing. On CUDA "
            "the scaler has no kernel for them and raises; on a CPU it has no effect."
        ),
        evidence=(
            *((f"The optimizer holds {_counted(served.params)} parameters: {listed(names)}.",) if names else ()),
            *(how_the_run_ended(trace) if refused is not None else ()),
        ),
    )
    if refused is None:
        return make_finding(statement, phase="static", dtype="bfloat16")
    return make_finding(statement, phase="optimizer", step=refused.step, dtype="bfloat16", source=raising_line(refused))


def detect_exhausted_scale(trace: Trace) -> Iterator[Finding]:
    """A scale that never fits, so that every step is skipped; what is not finite at any scale is its cause and comes before it."""
    raised = rejection_in(trace)
    refused = raised if raised is not None and AT_MINIMUM in raised.message else None
    skipped = unsettled(trace)
    idle = refused is None and not skipped
    if idle:
        skipped = never_stepped(trace)
    if refused is None and not skipped:
        return
    of_optimizer = [state for state in trace.all(ScalerState) if not skipped or state.optimizer == skipped[0].optimizer]
    if not skipped:
        skipped = tuple(takewhile(lambda state: state.skipped, reversed(of_optimizer)))[::-1]
    step, scales, evidence = (
        refused.step if refused is not None else None,
        "goes to its minimum",
        how_the_run_ended(trace),
    )
    spoilt = False
    if skipped:
        step, last = skipped[0].step, skipped[-1]
        moved = f"goes from {skipped[0].scale:.6g} to {last.scale:.6g}"
        scales = moved if skipped[0].scale != last.scale else f"stays at {last.scale:.6g}"
        taken = sum(not state.skipped for state in of_optimizer)
        evidence = (f"Skipped: steps {step} to {last.step}; steps taken before: {taken}.", *evidence)
        spoilt = any(
            site.kind in ("output", "loss") and not sample.finite and sample.step >= step
            for sample, site in trace.measured()
        )
    statement = Statement(
        id="loss-scale-exhausted",
        severity=Severity.WARNING if spoilt or idle else Severity.ERROR,
        summary=f"{len(skipped) or 'All'} steps in a row are skipped while the loss scale {scales}: nothing is trained.",
        cause=(
            "A scaler skips a step whose gradients are not finite and lowers its scale until they are. "
            + (
                "Here the forward pass is not finite, so no scale can help; see the other finding."
                if spoilt
                else "Here the run was over before it had come to a scale at which the gradients fit: begin with a smaller one (`init_scale`)."
                if idle
                else "Here the forward pass is finite, and the scale does not get to where the gradients fit: it is held up by a "
                "floor or a backoff close to 1, or even a scale of 1 is too large."
            )
        ),
        evidence=evidence,
    )
    source = raising_line(refused) if refused is not None else None
    yield make_finding(statement, phase="optimizer", step=step, source=source)


def detect_scaled_gradients(trace: Trace) -> Iterator[Finding]:
    """Gradients that are clipped or stepped with the loss scale on them, and losses that are scaled twice."""
    for seen in trace.observed(ScaledUse):
        what = seen.what
        line, scale = what.source or "A line outside of modules", f"{what.scale:,.6g}"
        if what.use == CLIPPED:
            summary = f"{line} clips gradients to {what.limit:.3g} while they are multiplied by the loss scale {scale}: in true gradients, to {what.limit / what.scale:.2g}."
            cause = "`GradScaler.unscale_` runs after the clipping, so every step is cut to the limit divided by the scale, and a change of the scale changes the steps."
        elif what.use == TWICE:
            summary = f"{line} scales a loss by {scale} that is scaled already; the scaler takes one scale off, and gradients are {scale} times too large."
            cause = "A loss has to be scaled once for each backward pass. An optimizer that normalizes gradients hides it; clipping, epsilon and weight decay do not."
        else:
            summary = f"{line} steps the optimizer with gradients that are multiplied by the loss scale {scale}."
            cause = "Only `GradScaler.step` and `GradScaler.unscale_` take the scale off, and only they skip steps whose gradients are inf or NaN."
        statement = Statement(
            id="scaled-gradients",
            severity=Severity.WARNING,
            summary=summary,
            cause=cause,
            evidence=(f"The loss of this backward pass was scaled by {scale}, and nothing had taken that off.",),
        )
        yield make_finding_of(seen, statement, dtype="float16", source=what.source or None)


def _counted(params: Mapping[str, int]) -> str:
    return " and ".join(f"{number} {dtype}" for dtype, number in sorted(params.items(), key=lambda item: -item[1]))


REJECTED = {"float16": "unscale-float16-gradients", "bfloat16": "scaler-bfloat16"}
WHY_REJECTED = {
    "float16": "torch.amp.GradScaler raises “Attempting to unscale FP16 gradients.” at the first step.",
    "bfloat16": "On CUDA the scaler's unscale kernel is not implemented for bfloat16 gradients, and raises.",
}


def check_trainable(subject: Subject) -> Iterator[Finding]:
    """Half-precision tensors that will be trained: an error where a scaler is wanted, else worth knowing for adapters."""
    wanted = subject.intent.scaler
    if not wanted and subject.adapter is None:
        return
    for dtype, finding in REJECTED.items():
        hostile = [tensor for tensor in _what_training_updates(subject) if subject.in_memory(tensor) == dtype]
        if hostile:
            statement = Statement(
                id=finding,
                severity=Severity.ERROR if wanted else Severity.INFO,
                confidence=Confidence.LIKELY if wanted else Confidence.POSSIBLE,
                summary=f"{len(hostile)} trainable tensor(s) are {dtype}, which a gradient scaler does not take.",
                cause=f"{WHY_REJECTED[dtype]} Weights that are trained with a scaler have to be float32.",
                evidence=(f"They are {listed([tensor.name for tensor in hostile])}.",),
            )
            yield make_finding(statement, phase="static", dtype=dtype)


def _what_training_updates(subject: Subject) -> Iterator[StaticTensor]:
    """What training would update: an adapter's own weights, or everything that is not known to be frozen."""
    adapter = subject.adapter
    whole = adapter.get("modules_to_save") if adapter is not None else None
    for tensor in subject.floating:
        saved_whole = isinstance(whole, (list, tuple)) and not set(whole).isdisjoint(tensor.name.split("."))
        # peft makes float32 of the others when it loads them
        is_adapter = adapter is not None and adapter.get("autocast_adapter_dtype") is False and tensor.dtype in HALF
        if tensor.trainable is not False and (adapter is None or saved_whole or is_adapter):
            yield tensor


RULES = (
    Rule(
        name="scaling",
        priority=30,
        specs=(UNSCALE_FLOAT16_GRADIENTS, SCALER_BFLOAT16, NO_INF_CHECKS),
        detect=detect_scaling,
    ),
    Rule(name="loss-scale", priority=60, specs=(LOSS_SCALE_EXHAUSTED,), detect=detect_exhausted_scale),
    Rule(name="scaled-gradients", priority=70, specs=(SCALED_GRADIENTS,), detect=detect_scaled_gradients),
    Rule(
        name="trainable-weights",
        priority=250,
        specs=(UNSCALE_FLOAT16_GRADIENTS, SCALER_BFLOAT16),
        inspect=check_trainable,
    ),
)
