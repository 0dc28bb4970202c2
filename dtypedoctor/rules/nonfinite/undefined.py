"""Operators that are not defined for their operands: in float32 either, because rounding made 0 of one, in an optimizer step.

Last, an operator that could not be run again, so that nothing says which of the two it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtypedoctor.diagnosis.nonfinite_origin import FLOAT32_MAX, NARROW, Origin, is_zero_in, rounded_before, rounds_to
from dtypedoctor.diagnosis.ops import all_finite, overload_free
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.wording import (
    bad_elements,
    differentiated,
    how_the_run_ended,
    limit_of,
    module_of,
    operands_are_finite,
    place,
    short,
    unmeasured,
)
from dtypedoctor.dtypes import DTYPES, HALF, parts_of
from dtypedoctor.rules import Statement, make_finding_at
from dtypedoctor.trace.events import Op, Sample, TensorNote
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import RoundedBefore


def judge_domain(origin: Origin) -> Finding | None:
    """What no wider dtype would have helped; the last of the judges, on whatever none of the others explains."""
    op = origin.op
    proof = _proof_of_domain(origin)
    statement = Statement(
        id="domain-error",
        proven_by=proof,
        summary=f"{_operator(origin)} has no finite float32 result for its operands, in step {op.step} ({op.phase}).",
        cause=_cause_of_domain(origin, proven=proof is not None),
        evidence=tuple(_domain_evidence(origin)),
    )
    return make_finding_at(origin, statement)


def _operator(origin: Origin) -> str:
    op, forward = origin.op, differentiated(origin.op)
    if forward is not None:
        return f"{op.op} in the backward of `{forward}` at {op.source}"
    return f"{op.op} in {short(place(op))}"


def _proof_of_domain(origin: Origin) -> str | None:
    """What shows that float32 has it too: the op on its own operands and on those of the float32 program, from the last exact values on.

    In a program without half precision these are the same. A float32 program that begins with what half precision has rounded
    shows nothing: a 0 among it may have been another number.
    """
    op, replay, program = origin.op, origin.replay, origin.program
    if replay is None or replay.note:
        return None
    if program is not None:
        in_float32 = f"{op.op} on the operands of the same program in float32 is not finite either"
        return in_float32 if program.exact and not program.finite else None
    if _saw_half_precision(origin):
        return None
    return f"{op.op} run again on the same operands in {replay.how} has no finite float32 result either"


def _saw_half_precision(origin: Origin) -> bool:
    """Whether any op up to this one used or made a tensor in half precision."""
    until = (op for op in origin.graph.ops if op.n <= origin.op.n)
    return any(parts_of(tensor.dtype) in HALF for op in until for tensor in (*op.inputs, *op.outputs))


def _cause_of_domain(origin: Origin, *, proven: bool) -> str:
    replay, program = origin.replay, origin.program
    if replay is not None and replay.finite and replay.absmax is not None and replay.absmax > FLOAT32_MAX:
        return f"{_BEYOND}{_of_growth(origin)} This is not a mixed-precision problem."
    undefined = (
        "The operation is not defined for these operands (a division by zero, the logarithm of a negative number …)"
    )
    if proven:
        return f"{undefined} or its result is larger than float32 can hold. This is not a mixed-precision problem."
    if program is None and not _saw_half_precision(origin):
        return f"{undefined}, and nothing that it computes with is in half precision. This is not a mixed-precision problem."
    again = (
        "What it computes with goes back to half precision, and was computed again in float32 only from there on"
        if program is not None and not program.note
        else "Some of what it computes with is in half precision, and was not computed again in float32"
    )
    return (
        f"{undefined}. {again}: a number that was rounded to 0 (or to 1) before would be another one. Whether float32 helps is not known; "
        "run what comes before it in float32 to tell."
    )


_BEYOND = "The result is larger than float32 can hold. "
_DIVERGES = "the run diverges (learning rate, initialization, gradients that are not clipped)."
_LARGE = "No growth that leads to it was measured in earlier calls"


def _of_growth(origin: Origin) -> str:
    """Whether what was measured before the op grew from call to call, and where large values may come from if it did not."""
    trace, op = origin.trace, origin.op
    grown = growth_over_calls(trace, op)
    if grown is not None:
        name, first, last = grown
        return f"The {name} has grown from {first:,.3g} to {last:,.3g} in the calls before: {_DIVERGES}"
    growth = growth_before(trace, op.step)
    if growth is not None and growth.diverges:
        return f"The largest weight has grown from {growth.weights[0]:,.3g} to {growth.weights[1]:,.3g} before: {_DIVERGES}"
    held = _largest_held(origin)
    if held is not None and held.absmax is not None:
        return f"{_LARGE}; {_WHAT[held.origin]} {held.name} already reaches {held.absmax:,.3g}."
    weight = largest_weight_before(trace, op)
    beside = f" (the largest weight is {weight:,.3g})" if weight is not None else ""
    return f"{_LARGE}; large values may come in with the data, the weights or a number of the code{beside}."


_WHAT = {"input": "the model's input", "parameter": "the parameter", "buffer": "the buffer"}
_LARGE_WEIGHT = 1e4
"""Magnitude from which on a weight is not an ordinary one."""


def _largest_held(origin: Origin) -> TensorNote | None:
    """The largest input, parameter or buffer that the call of the op has used before it; None where an ordinary weight is the largest."""
    before = (op for op in origin.graph.ops if op.call == origin.op.call and op.n <= origin.op.n)
    largest = max((t for op in before for t in op.inputs if t.origin in _WHAT), key=_size, default=None)
    return largest if largest is not None and (largest.origin == "input" or _size(largest) >= _LARGE_WEIGHT) else None


def _size(tensor: TensorNote) -> float:
    """Its largest magnitude; -1 where it was not measured."""
    return -1.0 if tensor.absmax is None else tensor.absmax


_BOUNDED = frozenset({"exp", "expm1", "exp2", "div", "reciprocal", "rsqrt", "log", "sqrt"})
"""Functions of which a bound of the argument, on the line itself, keeps the result finite."""


def of_what_is_too_large(finding: Finding) -> str:
    """What to do about a result that no float32 holds; empty for any other finding, and where the function's own argument can be bounded."""
    if not finding.cause.startswith(_BEYOND) or overload_free(finding.op or "") in _BOUNDED:
        return ""
    if _DIVERGES in finding.cause:
        return "Lower the learning rate, warm it up, or clip gradients: no dtype holds what keeps growing."
    first = (
        "weights first (initialization, a checkpoint)"
        if any(f"; {_WHAT[origin]} " in finding.cause for origin in ("parameter", "buffer"))
        else "input first (units, scaling, a corrupt row)"
    )
    return (
        f"Look at the {first}: the operands of `{finding.op}` are too large for its result to fit float32, so scale or clip them "
        "before it."
    )


def _domain_evidence(origin: Origin) -> Iterator[str]:
    op = origin.op
    if all_finite(op.inputs):
        yield f"{operands_are_finite(op)}."
    else:
        yield f"{op.op} is given infinities that the code has asked for, and makes NaN of them."
    yield f"{bad_elements(origin.result)} of its {origin.result.dtype} result are inf or NaN."
    yield from _in_a_wider_dtype(origin)
    yield from how_the_run_ended(origin.trace)


def _in_a_wider_dtype(origin: Origin) -> Iterator[str]:
    """What the op gives on the same operands in a wider dtype, and on those of the float32 program."""
    replay, program = origin.replay, origin.program
    if replay is None or replay.note:
        why = f": {replay.note}" if replay is not None else ""
        yield f"It could not be run again in a wider dtype{why}."
    elif not replay.finite:
        yield f"The same op on the same operands in {replay.how} is not finite either."
        if program is not None and not program.finite and not program.note:
            since = "from the last exact values on" if program.exact else "as far back as is known"
            yield f"Nor is it on the operands that the program has when it is computed in float32 {since}."
    elif replay.absmax is not None and replay.absmax > FLOAT32_MAX:
        yield f"The same op in {replay.how} gives {replay.absmax:.6g}, beyond float32's largest, {FLOAT32_MAX:.6g}."
    elif replay.absmax is None:
        yield f"What it gives in {replay.how} was not measured."
    else:
        yield f"The same op in {replay.how} is finite."


def judge_rounded(origin: Origin) -> Finding | None:
    """An op that has no finite result for its operands in any dtype, and has one for those of the float32 program."""
    op, again, program = origin.op, origin.replay, origin.program
    if again is None or again.note or program is None or not program.finite or program.absmax is None:
        return None
    if again.finite and (again.absmax is None or again.absmax <= FLOAT32_MAX):
        return None  # a wider dtype is all that this op needs
    rounded = rounded_before(origin.graph, op)
    where = f" at {rounded.source}" if rounded is not None and rounded.source not in (None, op.source) else ""
    statement = Statement(
        id="rounds-out-of-domain",
        proven_by=(
            f"{op.op} on the operands of the same program in float32 is finite (up to {program.absmax:,.6g}); on its own operands it is not, in "
            f"{again.how} either"
        ),
        summary=f"{_what_rounds(rounded)}{where}, and {op.op} in {short(place(op))} makes {_result(origin)} of it in step {op.step} ({op.phase}).",
        cause=_cause_of_rounding(rounded),
        evidence=tuple(_rounding_evidence(origin, rounded)),
    )
    finding = make_finding_at(origin, statement)
    if not where or rounded is None:
        return finding
    return replace(finding, op=rounded.op, source=rounded.source, fqn=rounded.module or place(op), dtype=rounded.dtype)


def _what_rounds(rounded: RoundedBefore | None) -> str:
    if rounded is None:
        return "Rounding moves an operand to where the operator is not defined"
    known = (
        f"The number {text} rounds to {to}"
        for text in rounded.scalars
        if (to := rounds_to(text, rounded.dtype)) is not None
    )
    what = f"The {rounded.parameter}" if rounded.parameter else f"The result of {rounded.op}"
    result = f"{what} rounds{' to 0' if rounded.zeros else ' to 1' if rounded.ones else ''}"
    return f"{next(known, result)} in {rounded.dtype}"


def _result(origin: Origin) -> str:
    return "NaN" if origin.result.num_nan else "inf"


def _cause_of_rounding(rounded: RoundedBefore | None) -> str:
    if rounded is None or not rounded.zeros:
        return (
            "In float32 the same program is finite here. Its values differ by rounding only, and one of them has crossed a border: "
            "1 - 1e-4 is 1 in bfloat16, two numbers become equal, and a small negative number under a root was positive."
        )
    known = DTYPES[rounded.dtype] if rounded.dtype in DTYPES else DTYPES["float16"]
    return (
        f"The smallest positive {known.name} number is {known.smallest:.3g}; whatever is below half of that becomes 0, and so does "
        "a difference below half of the spacing of numbers. An epsilon that guards a division has to be representable: take one from "
        "torch.finfo(dtype).tiny or eps on, or compute the guarded part in float32."
    )


def _rounding_evidence(origin: Origin, rounded: RoundedBefore | None) -> Iterator[str]:
    op = origin.op
    yield f"{bad_elements(origin.result)} of the {origin.result.dtype} result of {op.op} are inf or NaN; its operands are finite."
    if rounded is not None:
        at = f" at {rounded.source}" if rounded.source else ""
        lost, to = (rounded.zeros, "0") if rounded.zeros else (rounded.ones, "1")
        yield (
            f"With {rounded.op}{at} and what lies between in float32, it is finite; with only what lies between, it is not."
        )
        if lost:
            yield f"{lost:,} of {rounded.elements:,} elements of its {rounded.dtype} result are {to}; in float32 they are not."
    yield from how_the_run_ended(origin.trace)


DIVISIONS = frozenset(
    {"div", "addcdiv", "reciprocal", "rsqrt", "_foreach_div", "_foreach_addcdiv", "_foreach_reciprocal", "_fused_adam",
     "_fused_adamw"}
)  # fmt: skip


def judge_optimizer_step(origin: Origin) -> Finding | None:
    """A division in the optimizer step whose finite float16 operands give NaN or inf."""
    op, dtype = origin.op, origin.result.dtype
    if op.phase != "optimizer" or dtype not in NARROW or overload_free(op.op) not in DIVISIONS:
        return None
    seen = origin.incident.site
    fqn = module_of(seen.fqn) if seen is not None else place(op)
    vanished = _vanished_epsilon(origin)
    statement = Statement(
        id="optimizer-epsilon-underflow",
        proven_by=(
            f"the epsilon {vanished} that guards the division rounds to 0 in {dtype}, and does not in float32"
            if vanished is not None
            else None
        ),
        summary=f"The optimizer divides by zero in {dtype} in step {op.step} and writes NaN or inf into {short(fqn)}.",
        cause=(
            f"The optimizer keeps its state in the parameters' dtype. The smallest positive {dtype} is "
            f"{DTYPES[parts_of(dtype)].smallest:.3g}: the epsilon that guards the division and small second moments are zero in it."
        ),
        evidence=tuple(_step_evidence(origin, vanished)),
    )
    return replace(make_finding_at(origin, statement), fqn=fqn)


def _vanished_epsilon(origin: Origin) -> str | None:
    """The number that was added to a denominator and is zero in its dtype, as it stands in the code."""
    makers = (origin.graph.producer(t) for t in origin.op.inputs)
    for maker in [op for op in makers if op is not None and overload_free(op.op) in ("add", "_foreach_add")]:
        for text in maker.scalars:
            if is_zero_in(text, maker):
                return text
    return None


def _step_evidence(origin: Origin, vanished: str | None) -> Iterator[str]:
    op = origin.op
    yield f"The operands of {op.op} are finite, its result is not: {bad_elements(origin.result)}."
    if vanished is not None:
        yield f"The epsilon {vanished} that was added to the denominator is zero in {origin.result.dtype}."
    yield "The gradients of this step are finite."


COLLECTIVE = "_c10d_functional."


def judge_unexamined(origin: Origin) -> Finding | None:
    """An op on finite operands of which no replay says whether a wider dtype helps; never more than possible."""
    op, replay, dtype = origin.op, origin.replay, origin.result.dtype
    if (replay is not None and not replay.note) or not all(t.finite for t in op.inputs):
        return None
    why = _why(origin)
    statement = Statement(
        id="float16-overflow" if dtype in NARROW else "domain-error",
        confidence=Confidence.POSSIBLE,
        summary=f"{op.op} in {short(place(op))} is where {dtype} first stops being finite, in step {op.step}; it was not examined.",
        cause=(
            f"{op.op} at {op.source} has {_given(op)} and a result that is not finite. {why}, so whether float32 holds the result is "
            "not known: run the program with this part in float32 to tell an overflow from an undefined operation."
        ),
        evidence=(
            f"{operands_are_finite(op)} ({dtype} max: {limit_of(dtype):,.6g}).",
            f"{bad_elements(origin.result)} of its {dtype} result are inf or NaN.",
            *how_the_run_ended(origin.trace),
        ),
    )
    return make_finding_at(origin, statement)


def _given(op: Op) -> str:
    return "operands not all of which were measured" if unmeasured(op.inputs) else "finite operands"


def _why(origin: Origin) -> str:
    if origin.op.op.startswith(COLLECTIVE):
        return "It is computed by several ranks, and one of them cannot repeat it alone"
    note = origin.replay.note if origin.replay is not None else ""
    return f"It could not be run again in a wider dtype{f' ({note})' if note else ''}"


GROWN = 10.0
"""Times the largest weight, or loss and gradients together, have to have grown."""
MOVED = 2.0
"""Times the largest weight has to have grown at least: what it has not made grow comes from elsewhere."""
GROWN_TOO_FAR = 1000.0
"""Times the loss, or what the model returns, has to have grown from call to call for a result that no float32 holds to be where that leads."""
FEWEST = 3
"""Calls before the failure that show whether something grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What was measured of a training before a step.

    Attributes:
        steps: training steps with a finite loss before it.
        losses: the first of these losses, and the last.
        gradients: largest gradient of the first of these steps, and of the last.
        weights: largest weight before the first optimizer step, and after the last one before the failure.
    """

    steps: int
    losses: tuple[float, float]
    gradients: tuple[float, float]
    weights: tuple[float, float]

    @property
    def diverges(self) -> bool:
        """Whether the loss has not come down while the weights have grown far beyond where they began, or have moved and loss and
        gradients have grown."""
        grown = all(last >= GROWN * first > 0.0 for first, last in (self.losses, self.gradients))
        weights = self.weights[1] / self.weights[0] if self.weights[0] else 0.0
        return self.losses[1] >= self.losses[0] and (weights >= GROWN or (grown and weights >= MOVED))


def growth_before(trace: Trace, step: int) -> Growth | None:
    """What loss, gradients and weights did in the training steps before ``step``; None where no optimizer has stepped."""
    largest = {kind: _largest_by_step(trace, kind, step) for kind in ("loss", "grad", "param", "initial")}
    losses, gradients, weights = (_ends(largest[kind]) for kind in ("loss", "grad", "param"))
    if losses is None or gradients is None or weights is None:
        return None
    before = min(largest["initial"].values(), default=weights[0])
    return Growth(
        steps=len(largest["loss"]),
        losses=losses,
        gradients=gradients,
        weights=(before, max(largest["param"].values())),
    )


def _largest_by_step(trace: Trace, kind: str, before: int) -> dict[int, float]:
    """The largest finite magnitude at places of one kind, by step."""
    largest: dict[int, float] = {}
    for sample, site in trace.measured():
        if site.kind == kind and sample.step < before and sample.finite:
            largest[sample.step] = max(largest.get(sample.step, 0.0), sample.absmax)
    return largest


def _ends(by_step: dict[int, float]) -> tuple[float, float] | None:
    return (by_step[min(by_step)], by_step[max(by_step)]) if by_step else None


def growth_over_calls(trace: Trace, op: Op) -> tuple[str, float, float] | None:
    """What grew from call to call before ``op``: the loss, else what the outermost module returned; its first magnitude and its last.

    None where fewer than :data:`FEWEST` finite ones were measured, or where the last is not :data:`GROWN_TOO_FAR` times the first.
    """
    for kind, name in (("loss", "loss"), ("output", "output of the model")):
        found = _before(trace, op, kind)
        if len(found) >= FEWEST and found[-1] >= GROWN_TOO_FAR * found[0] > 0.0:
            return name, found[0], found[-1]
    return None


def _before(trace: Trace, op: Op, kind: str) -> list[float]:
    """The finite magnitudes of the loss, or of what the one outermost module returned, in the calls before that of ``op``."""
    names = ("", "0") if kind == "loss" else ("",)
    measured = [
        (site.root, sample.absmax)
        for sample, site in trace.measured()
        if site.kind == kind and site.fqn in names and sample.finite and _is_before(sample, op)
    ]
    return [absmax for _, absmax in measured] if len({root for root, _ in measured}) == 1 else []


def _is_before(sample: Sample, op: Op) -> bool:
    """Whether a measurement is of an earlier call; of a program without modules, whether it was made earlier."""
    return sample.n < op.n and (not op.call or sample.call < op.call)


def largest_weight_before(trace: Trace, op: Op) -> float | None:
    """The largest magnitude that was measured in weights before ``op``; None where no optimizer has stepped."""
    held = (
        sample.absmax
        for sample, site in trace.measured()
        if site.kind in ("initial", "param") and sample.finite and sample.n < op.n
    )
    return max(held, default=None)
