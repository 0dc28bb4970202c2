"""``nonfinite-parameters`` and ``nonfinite-input``: what was not finite before the model computed anything."""

from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.nonfinite_origin import NARROW, Origin, found_at
from dtypedoctor.diagnosis.statement import Statement
from dtypedoctor.diagnosis.wording import bad_elements, how_the_run_ended, limit_of, module_of, place, short
from dtypedoctor.trace.events import Op, TensorNote

HELD = frozenset({"parameter", "buffer", "attribute"})


def judge_given(origin: Origin) -> Finding | None:
    """An operand that no op of the watched part has made."""
    if origin.given is None:
        return None
    return _of_model(origin, origin.given) if origin.given.origin in HELD else _of_batch(origin, origin.given)


def _of_model(origin: Origin, tensor: TensorNote) -> Finding:
    op = origin.op
    name = tensor.name or "a tensor of the model"
    said = Statement(
        id="nonfinite-parameters",
        confidence=Confidence.LIKELY,
        summary=f"The {tensor.origin} {name} is not finite before step {op.step} uses it.",
        cause=(
            f"{bad_elements(tensor).capitalize()} of {name} were NaN or inf when {op.op} at {op.source} read it. An earlier "
            "run, a conversion to a narrower dtype, memory that was never written or a damaged file has left them so."
        ),
        evidence=(
            f"{name} ({tensor.dtype}): {tensor.num_nan} NaN, {tensor.num_posinf + tensor.num_neginf} inf.",
            f"{op.op} at {op.source} is the first that uses it; no op that was watched has written it.",
            *how_the_run_ended(origin.trace),
        ),
    )
    return replace(found_at(origin, said), fqn=module_of(name), op=None, phase="static", source=None)


def _of_batch(origin: Origin, tensor: TensorNote) -> Finding:
    op = origin.op
    what = f"The input {tensor.name} of {short(_outermost(origin))}" if tensor.origin == "input" else "A tensor"
    said = Statement(
        id="nonfinite-input",
        confidence=Confidence.LIKELY,
        summary=f"{what} that {op.op} at {op.source} uses is not finite already, in step {op.step}.",
        cause=f"The data holds NaN or inf before the model computes anything, so no dtype of the model can help.{_cast(tensor)}",
        evidence=(
            f"{bad_elements(tensor)} ({tensor.dtype}): {tensor.num_nan} NaN, {tensor.num_posinf + tensor.num_neginf} inf.",
            f"{op.op} at {op.source} is the first that uses it; no op that was watched has made it.",
            *how_the_run_ended(origin.trace),
        ),
    )
    fqn = _outermost(origin) if tensor.origin == "input" else place(op)
    return replace(found_at(origin, said), fqn=fqn, op=None, phase=_phase(op))


def _cast(tensor: TensorNote) -> str:
    """What infinities in a narrow dtype suggest, where nothing was divided to make NaN."""
    if tensor.dtype not in NARROW or tensor.num_nan:
        return ""
    return f" It is {tensor.dtype}: numbers beyond {limit_of(tensor.dtype):.6g} become inf when data is cast to it."


def _phase(op: Op) -> str:
    """Data goes into the forward pass; a loss reads its targets there even where no module is open."""
    return "forward" if op.phase in ("backward", "optimizer") else op.phase


def _outermost(origin: Origin) -> str | None:
    """Dotted name of the outermost module that the input was given to."""
    return None if place(origin.op) is None else ""
