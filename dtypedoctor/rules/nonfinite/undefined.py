"""Operators that are not defined for their operands: in float32 either, because rounding made 0 of one, in an optimizer step.

Then an operator that could not be run again, so that nothing says which of the two it is; and values that no recorded operator made: weights and
inputs, numbers in the code, calls without an op trace, compiled code.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtypedoctor.diagnosis.incidents import GRADIENTS, Incident
from dtypedoctor.diagnosis.nonfinite_origin import (
    FLOAT32_MAX,
    NARROW,
    Origin,
    finite_in_eager_mode,
    rounded_before,
    rounds_to,
)
from dtypedoctor.diagnosis.ops import all_finite, ancestry, is_uninitialized, overload_free
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.wording import (
    at_line,
    bad_elements,
    class_of,
    compiled_outside,
    differentiated,
    failing_line,
    how_the_run_ended,
    limit_of,
    max_of,
    module_of,
    modules_were_finite,
    operands_are_finite,
    operators_were_seen,
    place,
    rejection_in,
    short,
    unmeasured,
    worst_of,
)
from dtypedoctor.dtypes import DTYPES, HALF, parts_of
from dtypedoctor.rules import Statement, make_finding, make_finding_at
from dtypedoctor.trace.events import Op, Replay, Sample, Site
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import RoundedBefore, SteppedBy


def judge_domain(origin: Origin) -> Finding | None:
    """What no wider dtype would have helped; the last of the judges, on whatever none of the others explains."""
    op, replay, program = origin.op, origin.replay, origin.program
    forward = differentiated(op)
    where = f"in the backward of `{forward}`{at_line(op.source)}" if forward is not None else f"in {short(place(op))}"
    until = (one for one in origin.graph.ops if one.n <= op.n)
    saw_half = any(parts_of(t.dtype) in HALF for one in until for t in (*one.inputs, *one.outputs))

    # Proven where float32 has it too: the op on its own operands and on those of the float32 program, from the last exact values on. In a program
    # without half precision these are the same. A float32 program that begins with what half precision has rounded shows nothing.
    proof = None
    if replay is not None and not replay.note and program is not None and saw_half:
        if program.exact and not program.finite:
            proof = f"{op.op} on the operands of the same program in float32 is not finite either"
    elif replay is not None and not replay.note and not saw_half:
        proof = f"{op.op} run again on the same operands in {replay.how} has no finite float32 result either"

    other = origin.graph.replay(op, "other-values")
    if origin.graph.is_beyond_float32(op):
        cause = BEYOND_FLOAT32
    elif other is not None and not other.note and not other.finite:
        cause = OF_ANY_VALUES
        proof = f"{op.op} run again with other numbers in the place of its operands is not finite either"
    elif proof is not None or not saw_half:
        cause = f"{_UNDEFINED}, or its result is larger than float32 can hold. {_of_program(program)}"
    else:
        cause = (
            f"{_UNDEFINED}. What it computes with goes back to half precision, and was computed again in float32 at most from there on: a number that was "
            "rounded to 0 (or to 1) before would be another one. Whether float32 helps is not known; run what comes before it in float32 to tell."
        )
    given = ancestry(origin.graph, op).given
    in_float32 = ", in float32 too" if replay is not None and not replay.note else ""
    statement = Statement(
        id="domain-error",
        proven_by=proof,
        summary=f"{op.op} {where} returns {worst_of(origin.result)} in step {op.step} ({op.phase}){in_float32}.",
        cause=cause,
        evidence=(
            f"{operands_are_finite(op)}."
            if all_finite(op.inputs)
            else f"{op.op} is given infinities that {'no recorded operator has made' if given else 'the code has asked for'}, and makes NaN of them.",
            f"{bad_elements(origin.result)} of its {origin.result.dtype} result are inf or NaN.",
            *(_shapes(op) if cause == OF_ANY_VALUES else _in_a_wider_dtype(replay, program)),
            *how_the_run_ended(origin.trace),
        ),
    )
    return make_finding_at(origin, statement)


def _of_program(program: Replay | None) -> str:
    """Whether it is a matter of a dtype that an operator has no finite result in one of twice the bits either."""
    if program is None or program.note:
        return (
            "A wider dtype of this operator does not help. What comes before it was not computed in float64: a difference of nearly equal numbers may have "
            "the wrong sign."
        )
    if program.how == "float64-program":
        return "Nor does a wider dtype of what comes before it help, as far back as that is known: computed in float64, it is not finite either."
    return "This is not a mixed-precision problem."


_UNDEFINED = (
    "The operation is not defined for these operands (a division by zero, the logarithm of a negative number …)"
)
BEYOND_FLOAT32 = "The result is larger than float32 can hold: what the operator is given is too large for it."


OF_ANY_VALUES = (
    "It has no finite result whatever numbers it gets, in any dtype: what it gets is too few, as a mean of nothing, a variance of one value or a loss of which all "
    "labels are ignored, or a number in the code makes it so."
)


def _shapes(op: Op) -> Iterator[str]:
    """How much an op gets."""
    yield f"Shapes of its operands: {', '.join(str(tensor.shape) for tensor in op.inputs)}."
    yield "With other numbers in the place of its floating-point operands it is not finite either."


def _in_a_wider_dtype(replay: Replay | None, program: Replay | None) -> Iterator[str]:
    """What the op gives on the same operands in a wider dtype, and on those of the float32 program."""
    if replay is None or replay.note:
        why = f": {replay.note}" if replay is not None else ""
        yield f"It could not be run again in a wider dtype{why}."
    elif replay.finite:
        yield f"The same op in {replay.how} is finite{_beside_max(replay.absmax)}."
    else:
        yield f"The same op on the same operands in {replay.how} is not finite either."
        if program is not None and not program.finite and not program.note:
            since = "from the last exact values on" if program.exact else "as far back as is known"
            yield f"Nor is it on the operands that the program has when it is computed in {_wide_dtype(program)} {since}."


def _wide_dtype(program: Replay) -> str:
    """What everything before an operator was computed in again."""
    return program.how.removesuffix("-program")


def _beside_max(absmax: float | None) -> str:
    """A magnitude beside the largest of float32, which six digits may not tell apart."""
    if absmax is None:
        return ""
    said, most = f"{absmax:.6g}", f"{FLOAT32_MAX:.6g}"
    return (
        f", absmax {said} (float32 max is {most})" if said != most else f", absmax float32 max, {most}, or just above"
    )


def judge_rounded(origin: Origin) -> Finding | None:
    """An op that has no finite result for its operands in any dtype, and has one for those of the float32 program."""
    op, again, program = origin.op, origin.replay, origin.program
    if again is None or again.note or program is None or not program.finite or program.absmax is None:
        return None
    if again.finite and (again.absmax is None or again.absmax <= FLOAT32_MAX):
        return None  # a wider dtype is all that this op needs
    rounded = rounded_before(origin.graph, op)
    where = at_line(rounded.source) if rounded is not None and rounded.source not in (None, op.source) else ""
    operands = "finite" if all_finite(op.inputs) else "not all finite"
    # Outside of modules a finding's line stands for the place, and that is the line that rounds
    makes = f"at {op.source}" if place(op) is None and op.source else f"in {short(place(op))}"
    statement = Statement(
        id="rounds-out-of-domain",
        proven_by=(
            f"{op.op} on the operands of the same program in {_wide_dtype(program)} is finite (up to {program.absmax:,.6g}); on its own operands it is "
            f"not, in {again.how} either"
        ),
        summary=f"{_what_rounds(rounded)}{where}, and {op.op} {makes} makes {worst_of(origin.result)} of it in step {op.step} ({op.phase}).",
        cause=_cause_of_rounding(rounded, _wide_dtype(program)),
        evidence=(
            f"{bad_elements(origin.result)} of the {origin.result.dtype} result of {op.op} are inf or NaN; its operands are {operands}.",
            *_rounded_to(rounded, _wide_dtype(program)),
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


def _cause_of_rounding(rounded: RoundedBefore | None, wide: str) -> str:
    if rounded is None or not rounded.zeros:
        return (
            f"In {wide} the same program is finite here. Its values differ by rounding only, and one of them has crossed a border: "
            "1 - 1e-4 is 1 in bfloat16, two numbers become equal, and a small negative number under a root was positive."
        )
    known = DTYPES[rounded.dtype] if rounded.dtype in DTYPES else DTYPES["float16"]
    return (
        f"The smallest positive {known.name} number is {known.smallest:.3g}; whatever is below half of that becomes 0, and so does "
        "a difference below half of the spacing of numbers. An epsilon that guards a division has to be representable: take one from "
        f"torch.finfo(dtype).tiny or eps on, or compute the guarded part in {wide}."
    )


def _rounded_to(rounded: RoundedBefore | None, wide: str) -> Iterator[str]:
    if rounded is None:
        return
    at = at_line(rounded.source)
    yield f"With {rounded.op}{at} and what lies between in {wide}, it is finite; with only what lies between, it is not."
    if lost := rounded.zeros or rounded.ones:
        to = 0 if rounded.zeros else 1
        yield f"{lost:,} of {rounded.elements:,} elements of its {rounded.dtype} result are {to}; in {wide} they are not."


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
            f"{op.op}{at_line(op.source)} has {given} and a result that is not finite. {why}, so whether float32 holds the result is "
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


HELD = frozenset({"parameter", "buffer", "attribute"})


_WRITTEN = "No arithmetic has made it: the number is written by name, so no dtype helps."
_UNWRITTEN = "Nothing has written to this memory before it is used, so it holds whatever was there: no dtype helps, and the next run may differ."


_NOT_COMPILED = "what compiled functions compute"
_MAYBE_COMPILED = "It is data, or was computed where nothing was measured"
_IN_EAGER_MODE = (
    "Run it with `--ablate compile`: compiled functions then run as the Python code that they are, and the op trace sees into them. "
    "Or compile the module (`model.compile()`) and not the function that calls it."
)


def of_what_is_written(finding: Finding) -> str:
    """What to do about a number that the code names, or has never written, or that nothing was seen to make; empty for any other finding."""
    where = at_line(finding.source)
    if finding.cause == _WRITTEN:
        return f"Write a finite number{where}, or keep what is marked so out of what follows."
    if finding.cause == _UNWRITTEN:
        return f"Use `torch.zeros` in the place of `torch.empty`{where}, or write to all of it before it is used."
    if _UNSEEN in finding.cause:
        return (
            "Run the part without that kernel, by the library's own PyTorch code where it has some, to see whether the kernel is at fault; "
            "`dtypedoctor audit SCRIPT` tries the kernels of a step."
        )
    return _IN_EAGER_MODE if any(text in finding.cause for text in (_MAYBE_COMPILED, _NOT_COMPILED)) else ""


_UNSEEN = (
    "No torch operator has written to it in between, and none before it is known to have gone wrong: a kernel of Triton, NumPy or an extension module has "
    "computed it, of which nothing is known."
)


def judge_unseen(origin: Origin) -> Finding | None:
    """Memory that was finite when an operator had made it and is not when another uses it, with nothing bad before that."""
    if origin.unseen is None or origin.op is not origin.graph.producer(origin.unseen[1]):
        return None
    maker, (user, tensor) = origin.op, origin.unseen
    worst = worst_of(tensor)
    statement = Statement(
        id="domain-error",
        confidence=Confidence.LIKELY,
        summary=f"Code that passes no torch operator writes {worst} into what {maker.op} has made in {short(place(maker))}, in step {user.step} ({user.phase}).",
        cause=f"{maker.op}{at_line(maker.source)} has made it, without any, and {user.op}{at_line(user.source)} gets {worst}. {_UNSEEN}",
        evidence=(f"{bad_elements(tensor)} ({tensor.dtype}) are inf or NaN.", *how_the_run_ended(origin.trace)),
    )
    return replace(make_finding_at(origin, statement), op=None)


def through_unseen(origin: Origin) -> tuple[str, ...]:
    """What stands between an origin and what is not finite later, where no operator has carried it there."""
    if origin.unseen is None:
        return ()
    user, tensor = origin.unseen
    maker = origin.graph.producer(tensor)
    made = f"{maker.op}{at_line(maker.source)}" if maker is not None else "an operator"
    carried = (
        f"From there to {user.op}{at_line(user.source)} it is carried by code that passes no torch operator (a kernel of Triton, NumPy or an extension "
        f"module), which writes to what {made} has made: that it has read what is not finite is concluded from the order."
    )
    return (carried,)


def judge_written(origin: Origin) -> Finding | None:
    """The line that writes inf or NaN by name, or uses memory that nothing has written. What is written outside of all modules is data."""
    if not origin.written:
        return None
    op, result = origin.op, origin.result
    writer = f"The code of {short(place(op))}" if place(op) is not None else "The program"
    what = worst_of(result)
    if is_uninitialized(op):
        does, cause, held = "uses memory that it has not written", _UNWRITTEN, "hands out memory as it was"
    else:
        does, cause, held = f"writes {what} into a tensor", _WRITTEN, "writes it"
    statement = Statement(
        id="domain-error" if place(op) is not None else "nonfinite-input",
        summary=f"{writer} {does}, in step {op.step} ({op.phase}).",
        cause=cause,
        evidence=(
            f"{op.op}{at_line(op.source)} {held}: {bad_elements(result)} ({result.dtype}) are {what}, and no operator before it made any.",
            *how_the_run_ended(origin.trace),
        ),
    )
    return make_finding_at(origin, statement)


def judge_given(origin: Origin) -> Finding | None:
    """An operand that no op of the watched part has made: a tensor of the model, or data."""
    op, tensor = origin.op, origin.given
    if tensor is None:
        return None
    counted = f"({tensor.dtype}): {tensor.num_nan} NaN, {tensor.num_posinf + tensor.num_neginf} inf."
    if tensor.origin in HELD:
        name = tensor.name or "a tensor of the model"
        statement = Statement(
            id="nonfinite-parameters",
            summary=f"The {tensor.origin} {name} is not finite before step {op.step} uses it.",
            cause=(
                f"{bad_elements(tensor).capitalize()} of {name} were NaN or inf when {op.op}{at_line(op.source)} read it. An earlier "
                "run, a line of the program that writes them, a conversion to a narrower dtype, memory that was never written or a damaged file has left them so."
            ),
            evidence=(
                f"{name} {counted}",
                f"{op.op}{at_line(op.source)} is the first operator that uses it; no recorded operator wrote it.",
                *how_the_run_ended(origin.trace),
            ),
        )
        return replace(make_finding_at(origin, statement), fqn=module_of(name), op=None, phase="static", source=None)

    is_input = tensor.origin == "input"
    fqn = "" if is_input and place(op) is not None else None if is_input else place(op)
    # Infinities in a narrow dtype suggest a cast, where nothing was divided to make NaN
    beyond = f" It is {tensor.dtype}: numbers beyond {limit_of(tensor.dtype):.6g} become inf when data is cast to it."
    statement = Statement(
        id="nonfinite-input",
        confidence=Confidence.LIKELY if operators_were_seen(origin.trace) else Confidence.POSSIBLE,
        summary=f"{f'The input {tensor.name} of {short(fqn)}' if is_input else 'A tensor'} is NaN or inf before {op.op}{at_line(op.source)} uses it, in step {op.step}.",
        cause=_made_by(origin.trace, _IN_THE_DATA if is_input else _FROM_OUTSIDE)
        + (beyond if tensor.dtype in NARROW and not tensor.num_nan else ""),
        evidence=(
            f"{bad_elements(tensor)} {counted}",
            f"{op.op}{at_line(op.source)} is the first operator that uses it; no recorded operator produced it.",
            *how_the_run_ended(origin.trace),
        ),
    )
    # Data goes into the forward pass; a loss reads its targets there even where no module is open
    phase = "forward" if op.phase in ("backward", "optimizer") else op.phase
    return replace(make_finding_at(origin, statement), fqn=fqn, op=None, phase=phase)


_IN_THE_DATA = "The data holds NaN or inf before the model computes anything"
_FROM_OUTSIDE = "No recorded operator has made it: it is data, or comes from code whose operators are not recorded, such as numpy's or a tensor class's"


def _made_by(trace: Trace, made: str) -> str:
    """Where a value comes from that no recorded operator has made: known where enough was recorded."""
    if operators_were_seen(trace):
        return f"{made}, so no dtype of the model can help."
    where = "in a compiled function, say" if compiled_outside(trace) else "in a module call that was not measured, say"
    return f"No recorded operator has made it. {_MAYBE_COMPILED}: {where}."


CONVERSION_FAILED = re.compile("cannot be converted to type (at|c10)::Half without overflow")


def judge_constant(trace: Trace) -> Finding | None:
    """The number that ended the run because float16 does not hold it, such as the ``-1e9`` of a mask."""
    raised = rejection_in(trace)
    if raised is None or not CONVERSION_FAILED.search(raised.message):
        return None
    fqn = raised.modules[-1] if raised.modules else None
    statement = Statement(
        id="float16-overflow",
        summary=f"{raised.op or 'an operation'} in {short(fqn)} gets a number that float16 cannot hold, in step {raised.step} ({raised.phase}).",
        cause=(
            f"The number is written in the code or computed outside of tensors, and the tensor that it is written to is float16 "
            f"({max_of('float16')}); torch raises instead of writing inf. A mask's -1e9 is the usual case: "
            "torch.finfo(x.dtype).min fits every dtype."
        ),
        evidence=how_the_run_ended(trace),
    )
    return make_finding(
        statement,
        phase=raised.phase,
        step=raised.step,
        fqn=fqn,
        op=raised.op,
        dtype="float16",
        source=failing_line(raised),
        cls=class_of(trace, fqn or ""),
    )


NO_OPS = "no op trace says which operation made it"


def judge_by_module(trace: Trace, incident: Incident) -> Finding:
    """The module that first returned the bad value, or whose own code made it; never more than possible."""
    sample, site = incident.sample, incident.site
    if sample is None or site is None:
        return _outside(trace, incident)
    is_output, is_loss = site.kind == "output", site.kind == "loss"
    counted = f"{sample.num_nan} NaN and {sample.num_inf} inf"
    came_in = is_output and _was_given_it(trace, sample, site, site.fqn)
    if came_in and site.phase == "forward" and _was_given_it(trace, sample, site, ""):
        statement = Statement(
            id="nonfinite-input",
            confidence=Confidence.LIKELY if operators_were_seen(trace) else Confidence.POSSIBLE,
            summary=f"The model's input is already not finite, in step {sample.step}.",
            cause=_made_by(trace, _IN_THE_DATA),
            evidence=(
                f"{short(site.fqn)} is the first module to output it: {counted}.",
                "The outermost module was called with a tensor that is not finite.",
                *how_the_run_ended(trace),
            ),
        )
        cls = class_of(trace, "")
        return make_finding(statement, phase=incident.phase, step=sample.step, fqn="", dtype=site.dtype, cls=cls)

    fqn: str | None = site.fqn
    if is_loss or (site.kind == "accumulated" and not site.root):
        fqn = None
    elif came_in or site.kind in ("param", "grad"):
        fqn = module_of(site.fqn)
    # What was computed before the loss, outside of all modules or in compiled code, is not known apart
    first = "The loss" if is_loss and compiled_outside(trace) else short(fqn)
    where = f"in the loss, and {modules_were_finite(trace)}" if is_loss else f"at {short(site.fqn)}"
    statement = Statement(
        id=_finding_id(trace, site),
        confidence=Confidence.POSSIBLE,
        summary=f"{first} is where {site.dtype} first stops being finite, in step {sample.step} ({incident.phase}).",
        cause=f"The first inf or NaN was seen {where}; {NO_OPS}.",
        evidence=(
            f"{counted}; largest finite magnitude {sample.absmax:.6g} ({max_of(site.dtype)}).",
            *((f"Its input was {'already not finite' if came_in else 'finite'}.",) if is_output else ()),
            *how_the_run_ended(trace),
        ),
    )
    cls = class_of(trace, fqn or "")
    return make_finding(statement, phase=incident.phase, step=sample.step, fqn=fqn, dtype=site.dtype, cls=cls)


def _was_given_it(trace: Trace, sample: Sample, site: Site, fqn: str) -> bool:
    """Whether an input of module ``fqn`` was not finite either in the call of ``sample``; inputs are measured right after a bad output."""
    place = ("input", site.root, fqn)
    return any(
        later.n >= sample.n and later.call == sample.call and not later.finite
        for later, other in trace.measured()
        if (other.kind, other.root, other.fqn) == place
    )


def _finding_id(trace: Trace, site: Site) -> str:
    if site.dtype != "float16":
        return "domain-error"
    if site.kind in GRADIENTS:
        return "backward-overflow"
    if site.kind != "param" or site.phase != "optimizer":
        return "float16-overflow"
    steppers = [seen.what for seen in trace.observed(SteppedBy)]
    divides = not steppers or any(one.eps for one in steppers)
    return "optimizer-epsilon-underflow" if divides else "float16-overflow"


def _outside(trace: Trace, incident: Incident) -> Finding:
    """What code outside of all modules computed, and reads or rejects."""
    reached = incident.reached
    if reached is None:
        summary = f"Code outside of all modules rejected a value that is not finite, in step {incident.step} ({incident.phase})."
        finite = modules_were_finite(trace)
        cause = f"{finite[:1].upper()}{finite[1:]}; {NO_OPS}."
        op, source = None, None
    else:
        operators = (site for sample, site in trace.measured() if site.kind == "operator" and not sample.finite)
        first = next(operators, None)
        op, _, at = first.fqn.partition(" ") if first is not None else (None, "", "")
        source = at or reached.source
        summary = f"A value that is not finite {reached.got} in step {incident.step} ({incident.phase})."
        compiled = f", or is {_NOT_COMPILED}, which was not measured" if compiled_outside(trace) else ""
        made = f"{op}{at_line(source)} is the first operator outside of modules seen to output one" if op else NO_OPS
        cause = f"The value was computed outside of all modules{compiled}; {made}."
    statement = Statement(
        id="domain-error",
        confidence=Confidence.POSSIBLE,
        summary=summary,
        cause=cause,
        evidence=how_the_run_ended(trace),
    )
    return make_finding(statement, phase=incident.phase, step=incident.step, op=op, source=source)


COMPILED = "_orig_mod"


def judge_compiled(trace: Trace, incident: Incident) -> Finding | None:
    """The verdict on an incident whose call was made again in eager mode and was finite there."""
    again = finite_in_eager_mode(trace, incident)
    if again is None:
        return None
    site = incident.site
    fqn = ".".join(part for part in site.fqn.split(".") if part != COMPILED) if site is not None else None
    statement = Statement(
        id="compile-only-nonfinite",
        proven_by="the same call on the same input in eager mode is finite",
        summary=f"{short(fqn)} returns NaN or inf in step {incident.step} only because it is compiled.",
        cause=(
            "Compiled code keeps intermediate values in float32 and rounds once at the end, where eager mode rounds after each "
            "operation. That is closer to exact arithmetic and changes results at cliffs (a root of 1 - 1, say); a defect of the "
            "compiler looks the same. `torch._inductor.config.emulate_precision_casts` tells them apart."
        ),
        evidence=(
            f"The same call on the same input in eager mode is finite, absmax {again.eager_absmax:.6g}.",
            "With the op trace on, under which nothing is compiled, the failure did not come back either.",
        ),
    )
    dtype = site.dtype if site is not None else None
    return make_finding(statement, phase="compile", step=incident.step, fqn=fqn, dtype=dtype)
