"""Refusals that are explained by where the odd operand got its dtype: a norm, a buffer, the input, an adapter, the head."""

from dtypedoctor.diagnosis.mismatch.birth import Birth, Reason
from dtypedoctor.diagnosis.mismatch.case import Case, Operand
from dtypedoctor.diagnosis.mismatch.census import owner_of
from dtypedoctor.diagnosis.mismatch.report import Verdict, described, said, settled_by
from dtypedoctor.diagnosis.wording import place, short

__all__ = ["by_origin"]

OF_THE_OWNER = frozenset({
    Reason.EMBEDDING, Reason.LOAD_DTYPE, Reason.KEEP_IN_FP32, Reason.NORM, Reason.ATTRIBUTE, Reason.BUFFER, Reason.FSDP_OUTPUT,
})  # fmt: skip
"""Reasons that blame the module which holds the tensor, and not the one that met it."""


def by_origin(case: Case) -> Verdict | None:
    """The finding that the odd operand's origin asks for."""
    odd = case.odd
    if odd is None or len(case.dtypes) < 2:
        return None
    birth = odd.birth
    if birth.reason is Reason.NORM and birth.promoted is not None:
        return _norm(case, odd)
    if birth.reason in (Reason.BUFFER, Reason.ATTRIBUTE) and birth.promoted is not None:
        return _buffer(case, odd)
    if birth.reason is Reason.MODEL_INPUT:
        return _input(case, odd)
    if birth.reason is Reason.ADAPTER:
        return _adapter(case, odd)
    if _is_about_the_head(case, odd):
        return _head(case, odd)
    return _adapter(case, odd) if birth.reason is Reason.MODULES_TO_SAVE else _fallback(case, odd)


def _norm(case: Case, odd: Operand) -> Verdict:
    birth = odd.birth
    entry = case.census.keeper(birth.root, birth.fqn or "")
    kept = f" The model's list of modules to keep in float32 has {entry!r}, which names it." if entry else ""
    return Verdict(
        id="norm-promotes-to-float32",
        proven_by=settled_by(case, odd),
        blamed=odd,
        fqn=birth.fqn,
        summary=f"{short(birth.fqn)} returns {odd.dtype} for {case.rule} activations, and {_refuser(case)} refuses it.",
        cause=(
            f"The norm's weight is {odd.dtype}. It is multiplied with activations that were cast back to {case.rule}, and the "
            f"product of the two is {odd.dtype}: the norm's output follows its weight.{kept}"
        ),
        evidence=(f"The keep list's entry {entry!r} is contained in the name {birth.fqn}.",) if entry else (),
    )


def _buffer(case: Case, odd: Operand) -> Verdict:
    birth = odd.birth
    what = (
        "buffer"
        if birth.reason is Reason.BUFFER
        else "tensor (a plain attribute, which `module.to(dtype)` does not touch)"
    )
    return Verdict(
        id="buffer-promotes-to-float32",
        proven_by=settled_by(case, odd),
        blamed=odd,
        fqn=birth.fqn,
        summary=f"The {odd.dtype} {what.split()[0]} {birth.name} lifts {case.rule} activations, and {_refuser(case)} refuses them.",
        cause=(
            f"{birth.name} is a {odd.dtype} {what}. Arithmetic of two floating dtypes returns the wider one, so everything "
            f"after it is {odd.dtype}. Casting parameters only, and mixed-precision policies of shard units, leave buffers alone."
        ),
    )


def _input(case: Case, odd: Operand) -> Verdict:
    return Verdict(
        id="model-input-dtype",
        proven_by=settled_by(case, odd),
        blamed=odd,
        fqn=place(case.op),
        summary=f"The model is given {odd.dtype} where its weights are {case.rule}, and {_refuser(case)} refuses it.",
        cause=(
            f"{described(odd.birth)[0].upper()}{described(odd.birth)[1:]} gets to {said(case)} as it is. Nothing between the "
            f"caller and {short(place(case.op))} casts it."
        ),
    )


def _adapter(case: Case, odd: Operand) -> Verdict:
    birth = odd.birth
    wrapper = case.census.saved_copy(birth.root, birth.fqn or "")
    return Verdict(
        id="adapter-dtype-mismatch",
        proven_by=settled_by(case, odd),
        blamed=odd,
        fqn=wrapper or birth.fqn,
        summary=f"The adapter {short(birth.fqn)} is {odd.dtype}, the base model and its activations are {case.rule}.",
        cause=(
            f"{birth.name} is a trainable {odd.dtype} weight beside a frozen {case.rule} one. Neither autocast nor a cast at "
            "the adapter's input brings the two together here."
        ),
    )


def _head(case: Case, odd: Operand) -> Verdict:
    birth = odd.birth
    wrapper = case.census.saved_copy(birth.root, birth.fqn or "")
    head = short(place(case.op))
    if birth.reason is Reason.COMPUTE_DTYPE:
        cause = (
            f"The 4-bit layer {short(birth.fqn)} computes in {odd.dtype} (its compute dtype, float32 by default) and hands that on; "
            f"{head} is {case.rule} and casts nothing."
        )
    else:
        cause = f"The weight is {described(birth)}; the body hands on {case.rule}, and nothing casts it."
    return Verdict(
        id="head-dtype-mismatch",
        proven_by=settled_by(case, odd),
        blamed=odd,
        fqn=place(case.op) if birth.reason is Reason.COMPUTE_DTYPE else wrapper or birth.fqn,
        summary=f"The last layer, {head}, is {_own_dtype(case)} and is given {_given_dtype(case)}.",
        cause=cause,
    )


def _own_dtype(case: Case) -> str | None:
    """The dtype of the layer's own weight; what it should have been where none of its parameters was an operand."""
    return next((operand.dtype for operand in case.operands if operand.tensor.origin == "parameter"), case.rule)


def _given_dtype(case: Case) -> str | None:
    return next((dtype for dtype in case.dtypes if dtype != _own_dtype(case)), None)


def _fallback(case: Case, odd: Operand) -> Verdict:
    birth = odd.birth
    return Verdict(
        id="operand-dtype-mismatch",
        proven_by=settled_by(case, odd),
        blamed=odd,
        fqn=birth.fqn if birth.reason in OF_THE_OWNER else place(case.op),
        summary=f"{said(case)} in {short(place(case.op))} gets {' and '.join(case.dtypes)}.",
        cause=f"{case.rule} is what {_ruled_by(case)}. The {odd.dtype} operand goes back to {described(birth)}.{_more(case, birth)}",
    )


def _is_about_the_head(case: Case, odd: Operand) -> bool:
    """Whether the last layer's own weight is odd, or what it is given was computed in another dtype by a 4-bit layer."""
    if odd.birth.reason is Reason.COMPUTE_DTYPE:
        return case.census.is_head(case.op.root, case.op.fqn)
    own = odd.tensor.origin == "parameter" and owner_of(odd.tensor.name or "") == case.op.fqn
    return own and case.census.is_head(case.op.root, case.op.fqn)


def _refuser(case: Case) -> str:
    return f"{said(case)} in {short(place(case.op))}"


def _ruled_by(case: Case) -> str:
    if case.rule == case.op.autocast:
        return "the autocast region casts to"
    if case.rule == case.model_dtype:
        return "most of the model's weights are"
    return "the other operands are"


def _more(case: Case, birth: Birth) -> str:
    """What the reason itself asks to be said."""
    if birth.reason is Reason.KEEP_IN_FP32:
        entry = case.census.keeper(birth.root, birth.fqn or "")
        return f" The entry {entry!r} of the model's keep list names it, and its forward casts nothing."
    if birth.reason is Reason.FSDP_OUTPUT:
        return " A unit's output_dtype is applied at the end of every unit, inner ones too."
    return ""
