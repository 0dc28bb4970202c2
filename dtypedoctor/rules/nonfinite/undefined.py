"""Operators that are not defined for their operands: in float32 either, because rounding made 0 of one, in an optimizer step.

Last, an operator that could not be run again, so that nothing says which of the two it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtypedoctor.diagnosis.nonfinite_origin import FLOAT32_MAX, NARROW, Origin, rounded_before, rounds_to
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
from dtypedoctor.trace.events import Replay
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import RoundedBefore


def judge_domain(origin: Origin) -> Finding | None:
    """What no wider dtype would have helped; the last of the judges, on whatever none of the others explains."""
    op, replay, program = origin.op, origin.replay, origin.program
    forward = differentiated(op)
    where = f"in the backward of `{forward}` at {op.source}" if forward is not None else f"in {short(place(op))}"
    until = (one for one in origin.graph.ops if one.n <= op.n)
    saw_half = any(parts_of(t.dtype) in HALF for one in until for t in (*one.inputs, *one.outputs))

    # Proven where float32 has it too: the op on its own operands and on those of the float32 program, from the last exact values on. In a program
    # without half precision these are the same. A float32 program that begins with what half precision has rounded shows nothing.
    proof = None
    if replay is not None and not replay.note and program is not None:
        if program.exact and not program.finite:
            proof = f"{op.op} on the operands of the same program in float32 is not finite either"
    elif replay is not None and not replay.note and not saw_half:
        proof = f"{op.op} run again on the same operands in {replay.how} has no finite float32 result either"

    beyond = replay is not None and replay.finite and replay.absmax is not None and replay.absmax > FLOAT32_MAX
    if beyond:
        cause = BEYOND_FLOAT32
    elif proof is not None or (program is None and not saw_half):
        cause = f"{_UNDEFINED}, or its result is larger than float32 can hold. This is not a mixed-precision problem."
    else:
        cause = (
            f"{_UNDEFINED}. What it computes with goes back to half precision, and was computed again in float32 at most from there on: a number that was "
            "rounded to 0 (or to 1) before would be another one. Whether float32 helps is not known; run what comes before it in float32 to tell."
        )
    statement = Statement(
        id="domain-error",
        proven_by=proof,
        summary=f"{op.op} {where} has no finite float32 result for its operands, in step {op.step} ({op.phase}).",
        cause=cause,
        evidence=(
            f"{operands_are_finite(op)}."
            if all_finite(op.inputs)
            else f"{op.op} is given infinities that the code has asked for, and makes NaN of them.",
            f"{bad_elements(origin.result)} of its {origin.result.dtype} result are inf or NaN.",
            *_in_a_wider_dtype(replay, program),
            *how_the_run_ended(origin.trace),
        ),
    )
    return make_finding_at(origin, statement)


_UNDEFINED = (
    "The operation is not defined for these operands (a division by zero, the logarithm of a negative number …)"
)
BEYOND_FLOAT32 = "The result is larger than float32 can hold: what the operator is given is too large. This is not a mixed-precision problem."


def _in_a_wider_dtype(replay: Replay | None, program: Replay | None) -> Iterator[str]:
    """What the op gives on the same operands in a wider dtype, and on those of the float32 program."""
    if replay is None or replay.note:
        why = f": {replay.note}" if replay is not None else ""
        yield f"It could not be run again in a wider dtype{why}."
    elif replay.finite:
        magnitude = (
            f", absmax {replay.absmax:.6g} (float32 max is {FLOAT32_MAX:.6g})" if replay.absmax is not None else ""
        )
        yield f"The same op in {replay.how} is finite{magnitude}."
    else:
        yield f"The same op on the same operands in {replay.how} is not finite either."
        if program is not None and not program.finite and not program.note:
            since = "from the last exact values on" if program.exact else "as far back as is known"
            yield f"Nor is it on the operands that the program has when it is computed in float32 {since}."


def judge_rounded(origin: Origin) -> Finding | None:
    """An op that has no finite result for its operands in any dtype, and has one for those of the float32 program."""
    op, again, program = origin.op, origin.replay, origin.program
    if again is None or again.note or program is None or not program.finite or program.absmax is None:
        return None
    if again.finite and (again.absmax is None or again.absmax <= FLOAT32_MAX):
        return None  # a wider dtype is all that this op needs
    rounded = rounded_before(origin.graph, op)
    where = f" at {rounded.source}" if rounded is not None and rounded.source not in (None, op.source) else ""
    result = "NaN" if origin.result.num_nan else "inf"
    statement = Statement(
        id="rounds-out-of-domain",
        proven_by=(
            f"{op.op} on the operands of the same program in float32 is finite (up to {program.absmax:,.6g}); on its own operands it is not, in "
            f"{again.how} either"
        ),
        summary=f"{_what_rounds(rounded)}{where}, and {op.op} in {short(place(op))} makes {result} of it in step {op.step} ({op.phase}).",
        cause=_cause_of_rounding(rounded),
        evidence=(
            f"{bad_elements(origin.result)} of the {origin.result.dtype} result of {op.op} are inf or NaN; its operands are finite.",
            *_rounded_to(rounded),
            *how_the_run_ended(origin.trace),
        ),
    )
    finding = make_finding_at(origin, statement)
    if not where or rounded is None:
        return finding
    return replace(finding, op=rounded.op, source=rounded.source, fqn=rounded.module or place(op), dtype=rounded.dtype)


def _what_rounds(rounded: RoundedBefore | None) -> str:
    if rounded is None:
        return "Rounding moves an operand to where the operator is not defined"
    for text in rounded.scalars:
        if (to := rounds_to(text, rounded.dtype)) is not None:
            return f"The number {text} rounds to {to} in {rounded.dtype}"
    what = f"The {rounded.parameter}" if rounded.parameter else f"The result of {rounded.op}"
    return f"{what} rounds{' to 0' if rounded.zeros else ' to 1' if rounded.ones else ''} in {rounded.dtype}"


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


def _rounded_to(rounded: RoundedBefore | None) -> Iterator[str]:
    if rounded is None:
        return
    at = f" at {rounded.source}" if rounded.source else ""
    yield f"With {rounded.op}{at} and what lies between in float32, it is finite; with only what lies between, it is not."
    if lost := rounded.zeros or rounded.ones:
        to = 0 if rounded.zeros else 1
        yield f"{lost:,} of {rounded.elements:,} elements of its {rounded.dtype} result are {to}; in float32 they are not."


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

    # The number that was added to the denominator, as it stands in the code, where it is 0 in that dtype
    added = (one for one in origin.graph.makers(op.inputs) if overload_free(one.op) in ("add", "_foreach_add"))
    epsilon = next((text for one in added for text in one.scalars if rounds_to(text, one.outputs[0].dtype) == 0), None)
    of_epsilon = (f"The epsilon {epsilon} that was added to the denominator is zero in {dtype}.",) if epsilon else ()
    statement = Statement(
        id="optimizer-epsilon-underflow",
        proven_by=epsilon
        and f"the epsilon {epsilon} that guards the division rounds to 0 in {dtype}, and does not in float32",
        summary=f"The optimizer divides by zero in {dtype} in step {op.step} and writes NaN or inf into {short(fqn)}.",
        cause=(
            f"The optimizer keeps its state in the parameters' dtype. The smallest positive {dtype} is "
            f"{DTYPES[parts_of(dtype)].smallest:.3g}: the epsilon that guards the division and small second moments are zero in it."
        ),
        evidence=(
            f"The operands of {op.op} are finite, its result is not: {bad_elements(origin.result)}.",
            *of_epsilon,
            "The gradients of this step are finite.",
        ),
    )
    return replace(make_finding_at(origin, statement), fqn=fqn)


COLLECTIVE = "_c10d_functional."


def judge_unexamined(origin: Origin) -> Finding | None:
    """An op on finite operands of which no replay says whether a wider dtype helps; never more than possible."""
    op, replay, dtype = origin.op, origin.replay, origin.result.dtype
    if (replay is not None and not replay.note) or not all_finite(op.inputs):
        return None
    why = f"It could not be run again in a wider dtype{f' ({replay.note})' if replay is not None else ''}"
    if op.op.startswith(COLLECTIVE):
        why = "It is computed by several ranks, and one of them cannot repeat it alone"
    given = "operands not all of which were measured" if unmeasured(op.inputs) else "finite operands"
    statement = Statement(
        id="float16-overflow" if dtype in NARROW else "domain-error",
        confidence=Confidence.POSSIBLE,
        summary=f"{op.op} in {short(place(op))} is where {dtype} first stops being finite, in step {op.step}; it was not examined.",
        cause=(
            f"{op.op} at {op.source} has {given} and a result that is not finite. {why}, so whether float32 holds the result is "
            "not known: run the program with this part in float32 to tell an overflow from an undefined operation."
        ),
        evidence=(
            f"{operands_are_finite(op)} ({dtype} max: {limit_of(dtype):,.6g}).",
            f"{bad_elements(origin.result)} of its {dtype} result are inf or NaN.",
            *how_the_run_ended(origin.trace),
        ),
    )
    return make_finding_at(origin, statement)


GROWN = 10.0
"""Times the largest weight, or loss and gradients together, have to have grown."""
MOVED = 2.0
"""Times the largest weight has to have grown at least: what it has not made grow comes from elsewhere."""


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
    largest: dict[str, dict[int, float]] = {kind: {} for kind in ("loss", "grad", "param", "initial")}
    for sample, site in trace.measured():
        if site.kind in largest and sample.step < step and sample.finite:
            by_step = largest[site.kind]
            by_step[sample.step] = max(by_step.get(sample.step, 0.0), sample.absmax)
    if not (largest["loss"] and largest["grad"] and largest["param"]):
        return None
    (losses, gradients, weights) = (
        (values[min(values)], values[max(values)]) for values in (largest["loss"], largest["grad"], largest["param"])
    )
    before = min(largest["initial"].values(), default=weights[0])
    return Growth(
        steps=len(largest["loss"]),
        losses=losses,
        gradients=gradients,
        weights=(before, max(largest["param"].values())),
    )
