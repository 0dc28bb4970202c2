"""Results that float32 holds and their own dtype does not: in any operator, in a norm's squares, in attention scores, in gradients.
Then those that a later operator makes finite again, which no check for inf or NaN sees; at the end casts to float8 without a scale that fits.

``fully-masked-row`` is here as well, because an overflow and a mask can leave the same rows of ``-inf`` before a softmax.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from dtypedoctor.diagnosis.incidents import is_expected
from dtypedoctor.diagnosis.nonfinite_origin import PRODUCTS, SOFTMAX, Origin, attention_experiment, loss_scale
from dtypedoctor.diagnosis.ops import Mask, OpGraph, ancestry, has_inf, mask_before, overload_free
from dtypedoctor.diagnosis.rule import SILENT, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import (
    at_line,
    bad_elements,
    class_of,
    how_the_run_ended,
    limit_of,
    listed,
    magnitudes,
    max_of,
    module_of,
    named_module,
    number,
    operands_are_finite,
    percent,
    place,
    short,
)
from dtypedoctor.dtypes import DTYPES, short_name
from dtypedoctor.rules import Statement, make_finding, make_finding_at, make_finding_of
from dtypedoctor.trace.events import Observed, Op
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import Absorbed, Float8Cast, Overflowed, RoundedUse


def judge_overflow(origin: Origin) -> Finding | None:
    """An overflow that none of the more specific findings explains."""
    if not origin.leaves_a_narrow_range:
        return None
    op, dtype = origin.op, origin.result.dtype
    limit = limit_of(dtype)
    statement = Statement(
        id="float16-overflow",
        proven_by=proof(origin),
        summary=f"{dtype} overflow in {short(place(op))}, step {op.step}, {op.phase}: {needs(origin)}.",
        cause=(
            f"{op.op}{at_line(op.source)} has finite operands, and a sum inside of it grows beyond the largest finite {dtype} value, "
            f"{number(limit)}, although the result would not."
            if fits(origin)
            else f"{op.op}{at_line(op.source)} has finite operands and a result larger than the largest finite {dtype} value, "
            f"{number(limit)}, which becomes inf.{_of_the_input(op)}"
        ),
        evidence=tuple(overflow_evidence(origin)),
    )
    return make_finding_at(origin, statement)


def _of_the_input(op: Op) -> str:
    """A sentence where what overflows is the cast of the model's own input: nothing that the model computes; else empty."""
    if overload_free(op.op) not in _CASTS or not op.inputs or op.inputs[0].origin != "input":
        return ""
    return (
        f" It casts the model's input ({op.inputs[0].name}), which is too large before anything is computed with it: look at the data first (units, scaling, a corrupt "
        "row). bfloat16 holds such values, and hides them."
    )


def proof(origin: Origin) -> str | None:
    """The replay that proves an overflow; None where it shows nothing that the op's own dtype could not hold."""
    op, replay = origin.op, origin.replay
    if not origin.is_proven or replay is None or replay.absmax is None:
        return None
    dtype = origin.result.dtype
    if fits(origin):
        return (
            f"{op.op} run again on the same operands in {replay.how} is finite, and its result would fit into {dtype}"
        )
    return (
        f"{op.op} run again on the same operands in {replay.how} gives finite values up to {number(replay.absmax)}, "
        f"beyond {dtype} max ({limit_of(dtype):,.6g})"
    )


def fits(origin: Origin) -> bool:
    """Whether the result, computed in a wider dtype, is one that the op's own dtype can hold: a sum on the way to it is not."""
    replay = origin.replay
    if replay is None or not replay.finite or replay.absmax is None:
        return False
    return replay.absmax <= limit_of(origin.result.dtype)


def needs(origin: Origin) -> str:
    """The range that the result needs against the range that there is."""
    replay, dtype = origin.replay, origin.result.dtype
    if replay is not None and fits(origin):
        return (
            f"a sum inside of {origin.op.op} exceeds {dtype} max ({limit_of(dtype):,.6g}), "
            f"although its result would be {replay.absmax:,.6g}"
        )
    if replay is None or replay.absmax is None:
        return f"{origin.op.op} exceeds {dtype} max ({number(limit_of(dtype))})"
    return f"{origin.op.op} reaches {number(replay.absmax)}, {max_of(dtype)}"


def overflow_evidence(origin: Origin) -> Iterator[str]:
    """What was measured about an op whose finite operands gave something that is not finite."""
    op, replay, result = origin.op, origin.replay, origin.result
    yield f"{operands_are_finite(op)} ({max_of(result.dtype)})."
    yield f"{bad_elements(result)} of its {short_name(result.dtype)} result are inf or NaN."
    if replay is not None and replay.finite and replay.absmax is not None:
        yield f"The same op on the same operands in {replay.how} is finite, absmax {number(replay.absmax)}."
    seen = origin.incident.site
    if seen is not None and seen.kind == "output" and seen.fqn != place(op):
        yield f"{short(seen.fqn)} ({seen.cls}) is the first module that outputs inf or NaN."
    yield from how_the_run_ended(origin.trace)


REDUCTIONS = frozenset({"sum", "mean"})
LENGTHS = frozenset({"linalg_vector_norm", "norm", "_foreach_norm"})
ROOTS = frozenset({"sqrt", "rsqrt"})
DIVISIONS = frozenset({"div", "reciprocal"})
TO_ROOT = 8
"""The mean, an epsilon, casts and reshapes lie between the squares and the root."""

CAUSE_IN_A_NORM = (
    "A norm computes the root of a mean of squares. The square of 256 is already beyond float16's 65504; it becomes inf, its "
    "reciprocal root 0, and the norm returns zeros that carry no information. Norms that compute in float32 inside and cast "
    "their result are not affected."
)

_GRADIENTS_OVERFLOW = "The norm of the gradients overflows {}"
CAUSE_IN_A_CLIPPING = (
    "The gradients are finite, and the root of the sum of their squares is not: it is computed in the dtype of the gradients and becomes inf. Clipping "
    "multiplies all gradients by the largest norm that it allows over this one, which is 0, so the step trains nothing. No check for inf or NaN sees it."
)


def judge_norm_square(origin: Origin) -> Finding | None:
    """An overflow in the squares, their sum or their root inside a norm."""
    op = origin.op
    if not origin.leaves_a_narrow_range or not is_in_norm(origin.graph, op):
        return None
    clips = any(tensor.origin == "gradient" for tensor in op.inputs)
    squares = f"The squares inside {short(place(op))} overflow"
    statement = Statement(
        id="norm-square-overflow",
        proven_by=proof(origin),
        summary=f"{_GRADIENTS_OVERFLOW.format(origin.result.dtype) if clips else squares} in step {op.step}: {needs(origin)}.",
        cause=CAUSE_IN_A_CLIPPING if clips else CAUSE_IN_A_NORM,
        evidence=tuple(overflow_evidence(origin)),
    )
    return make_finding_at(origin, statement)


def is_in_norm(graph: OpGraph, op: Op) -> bool:
    """Whether ``op`` squares, sums squares or takes a length, and a root or division follows."""
    name = overload_free(op.op)
    after = {overload_free(user.op) for user in graph.downstream(op, TO_ROOT, ends=ROOTS | DIVISIONS)}
    if name in LENGTHS:
        return bool(after & DIVISIONS)
    squares = is_square(op) or (name in REDUCTIONS and any(map(is_square, graph.makers(op.inputs))))
    return squares and bool(after & ROOTS)


def is_square(op: Op) -> bool:
    """Whether ``op`` multiplies a tensor with itself."""
    name = overload_free(op.op)
    if name == "pow":
        return any(text in ("2", "2.0") for text in op.scalars)
    return name == "square" or (name == "mul" and len(op.inputs) == 2 and op.inputs[0].id == op.inputs[1].id)


TO_SOFTMAX = 12
"""Scaling, soft capping, masks, casts and reshapes lie between the scores and their softmax, each an op."""
_FUSED = "the same attention with its scores in float32 is finite"
_UNMASKED = "the same softmax on the same scores without the mask is finite"

_AT_LEAST_ONE = (
    "Leave each query at least one position that it may attend to, or mask with the smallest finite number of {dtype}."
)


def _how_it_was_masked(mask: Mask | None, left: Op | None) -> str:
    """What made every entry of a row -inf, as measured, and what to do about it."""
    advice = _AT_LEAST_ONE.format(dtype=mask.narrowest if mask is not None else "the dtype")
    if mask is None and left is not None and (filled := _number_in(left)):
        dtype = left.outputs[0].dtype
        return f"{left.source} masks with {filled}, and the smallest number of {dtype} is -{number(limit_of(dtype))}. {advice}"
    if mask is None:
        return (_LEFT_THE_RANGE if len(left.inputs) > 1 else _CAST_OUT_OF_RANGE) if left is not None else advice
    if mask.infinite is mask.fill:
        return f"{mask.fill.source} fills the mask with -inf. {advice}"
    filled = f"{mask.fill.source} fills the mask with {f'{mask.value:g}'.replace('e+0', 'e')}"
    limit = number(limit_of(mask.narrowest))
    return f"{filled}, and {mask.infinite.source} casts it to {mask.narrowest}, whose smallest number is -{limit}. {advice}"


def _number_in(op: Op) -> str:
    """The number in the code that an operator makes a tensor of; empty for any other operator."""
    for text in () if op.inputs else op.scalars:
        with suppress(ValueError):
            return f"{float(text):g}".replace("e+0", "e")
    return ""


_LEFT_THE_RANGE = "Not every entry was -inf at first: the mask holds finite numbers, and what was added to them left the range. Add scores and mask in float32."

_CAST_OUT_OF_RANGE = "Not every entry was -inf at first: the mask holds finite numbers, which a cast has made infinite. Mask with a number that the narrower dtype has."


def judge_attention_scores(origin: Origin) -> Finding | None:
    """A product of two activations whose overflow goes into a softmax."""
    op, dtype = origin.op, origin.result.dtype
    is_product = overload_free(op.op) in PRODUCTS and not any(t.origin == "parameter" for t in op.inputs)
    after = origin.graph.downstream(op, TO_SOFTMAX, ends=PRODUCTS | SOFTMAX)
    is_score = is_product and any(overload_free(user.op) in SOFTMAX for user in after)
    if not origin.leaves_a_narrow_range or not is_score:
        return None

    tried = attention_experiment(origin.trace, op)
    statement = Statement(
        id="attention-score-overflow",
        proven_by=proof(origin) or (_FUSED if tried is not None and tried.is_of_the_scores else None),
        summary=f"The attention scores of {short(place(op))} overflow {dtype} in step {op.step}: {needs(origin)}.",
        cause=(
            f"Queries and keys are multiplied in {dtype}, so the product itself has to fit below {number(limit_of(dtype))}, "
            f"whatever scales it afterwards. Softmax makes NaN of the inf. Fused attention keeps the scores in float32."
        ),
        evidence=(*overflow_evidence(origin), *(tried.evidence if tried is not None else ())),
    )
    return make_finding_at(origin, statement)


def judge_masked_row(origin: Origin) -> Finding | None:
    """A softmax over rows in which every entry is ``-inf``."""
    if not origin.masked:
        return None
    op, replay = origin.op, origin.replay
    scores = next(t for t in op.inputs if has_inf(t))
    tried = attention_experiment(origin.trace, op)
    left = next(iter(ancestry(origin.graph, op).computed), None)
    mask = mask_before(origin.graph, op)
    proven = None
    if tried is not None and tried.is_of_the_mask:
        proven = _UNMASKED
    elif replay is not None and not replay.note and not replay.finite:
        proven = f"the same softmax on the same rows in {replay.how} is NaN too, and every entry of these rows is -inf"
    evidence = [
        f"The scores that {op.op} got hold {scores.num_neginf} times -inf, no +inf and no NaN.",
        f"{bad_elements(origin.result)} of its result are NaN.",
        *(tried.evidence if tried is not None else ()),
        *how_the_run_ended(origin.trace),
    ]
    if left is not None and mask is None:
        made = next(t for t in left.outputs if not t.finite)
        given = " and ".join(sorted({t.dtype for t in left.inputs if t.dtype in DTYPES})) or made.dtype
        of = f"finite {given} numbers, absmax {magnitudes(left)}"
        of = f"{filled} in {made.dtype}" if (filled := _number_in(left)) else of
        evidence.insert(0, f"{left.op}{at_line(left.source)} made -inf of {of}.")
    statement = Statement(
        id="fully-masked-row",
        proven_by=proven,
        summary=f"{short(place(op))} takes a softmax over rows in which every position is masked, in step {op.step}.",
        cause=(
            "Softmax subtracts the largest entry of a row. Where every entry is -inf that is -inf - (-inf), which is NaN "
            f"in every dtype. {_how_it_was_masked(mask, left)}"
        ),
        evidence=tuple(evidence),
    )
    return make_finding_at(origin, statement)


def judge_backward(origin: Origin) -> Finding | None:
    """An overflow of a backward op."""
    op, dtype = origin.op, origin.result.dtype
    if op.phase != "backward" or not origin.leaves_a_narrow_range:
        return None
    evidence = list(overflow_evidence(origin))
    scale, replay = loss_scale(origin), origin.replay
    if scale is not None and replay is not None and replay.absmax is not None:
        at_one = number(replay.absmax / scale)
        evidence.append(f"The loss scale was {scale:g}; at scale 1 the result would be {at_one}, still too large.")
    parameter = _added_up(origin)
    if parameter is not None:
        where = f"The gradient of {short(parameter)} overflows {dtype} where backward passes are added up"
        cause = (
            f"Each backward pass adds to the gradient that the ones before it have left, in the parameter's own {dtype}. Every part "
            f"is finite, their sum is not. Divide the loss by the number of passes, or keep the parameters in float32."
        )
    else:
        where = f"The gradients overflow {dtype} in the backward of {short(place(op))}"
        cause = (
            "Gradients have their own magnitudes: the product of all slopes between the loss and a tensor. The values of the "
            f"forward pass are finite, this gradient is not: {max_of(dtype)} here too."
        )
    statement = Statement(
        id="backward-overflow",
        proven_by=proof(origin),
        summary=f"{where}, in step {op.step}: {needs(origin)}.",
        cause=cause,
        evidence=tuple(evidence),
    )
    finding = make_finding_at(origin, statement)
    return replace(finding, fqn=module_of(parameter)) if parameter is not None else finding


def _added_up(origin: Origin) -> str | None:
    """The parameter to whose gradient the op adds that of one more backward pass; None for every other op."""
    op, seen = origin.op, origin.incident
    if not op.inplace or place(op) is not None or not _may_be_sum(origin):
        return None
    sites = [origin.trace.sites[sample.site] for sample in seen.samples]
    named = (s.fqn for s in sites if s.kind == seen.kind and s.shape == origin.result.shape)
    return next((name for name in named if not name.startswith(NAMELESS)), None)


def _may_be_sum(origin: Origin) -> bool:
    """Whether a gradient was there before. Until an optimizer has taken gradients they are measured where each pass leaves them, also the only one."""
    op, kind = origin.op, origin.incident.kind
    losses = [s.n for s, site in origin.trace.measured() if site.kind == "loss" and s.step == op.step]
    return kind == "grad" or (kind == "accumulated" and sum(n < op.n for n in losses) > 1)


NAMELESS = "leaf "
"""How a gradient's name begins that is of no parameter of a module."""


HARMLESS = 0.05
"""Relative error below which the result is what float32 gives, but for rounding."""
CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "hardtanh", "minimum", "maximum"})
REPLACEMENTS = frozenset({"nan_to_num", "where", "masked_fill"})
EDGE = 0.5
"""Share of a dtype's range from which on the bound of a clamp is meant to catch overflows; that of a ReLU6 is not."""


def swallowed_overflows(trace: Trace) -> Iterator[Finding]:
    """Overflows after which the values are finite without anybody having wanted to rescue them.

    A result that differs from float32's is an error; one that does not is worth knowing, and no more than that.
    """
    told: set[str | None] = set()
    for seen in trace.observed(Absorbed):
        what, rescues = seen.what, is_rescue(seen)
        if not what.rescued or is_expected(trace, seen.n):
            continue
        if not what.born.rounded:
            # a mask that has become -inf, say, is to what follows as good as any very negative number
            if not rescues and not what.born.negative:
                yield _swallowed(trace, seen)
        elif what.relative_error > HARMLESS and what.source not in told:
            told.add(what.source)
            yield _rounded_and_replaced(seen, Severity.WARNING if rescues else Severity.ERROR)


def _rounded_and_replaced(seen: Observed[Absorbed], severity: Severity) -> Finding:
    """What float16 has rounded to 0 made inf or NaN outside of modules, and a later operator made it finite again."""
    what, born = seen.what, seen.what.born
    elements = "1 element" if what.rescued == 1 else f"{what.rescued:,} elements"
    statement = Statement(
        id="rounds-out-of-domain",
        proven_by=f"{born.op} and what follows it up to {what.op}, run again in float32, is finite everywhere, and the result is another one",
        severity=severity,
        summary=(
            f"The result of {born.op} rounds to 0 in {born.dtype}, {born.made_by} makes inf or NaN of it, and {what.op} replaces {elements} in step "
            f"{seen.step}."
        ),
        cause=(
            f"The smallest positive {born.dtype} number is {DTYPES[born.dtype].smallest:.3g}. {born.op}{at_line(born.source)} gives {born.rounded:,} zeros that are "
            f"other numbers in float32. {born.made_by}{at_line(born.made_at)} makes inf or NaN of them, and {what.op}{at_line(what.source)} finite values, so that no "
            "check sees it. Compute this part in float32."
        ),
        evidence=(
            f"{born.rounded:,} of {born.elements:,} elements are 0 in {born.dtype} only.",
            *_to_the_first_finite(what),
        ),
    )
    return make_finding_of(seen, statement, dtype=born.dtype, op=born.made_by, source=born.made_at)


def is_rescue(seen: Observed[Absorbed]) -> bool:
    """Whether the operator that ends an overflow in finite values is there to replace what is not finite."""
    what = seen.what
    name = overload_free(what.op)
    if name in REPLACEMENTS:
        return name == "nan_to_num" or what.by_mask
    bounds = [*what.scalars, *map(str, what.bounds)]
    return name in CLAMPS and any(_is_edge(text, what.born.dtype) for text in bounds)


def _is_edge(text: str, dtype: str) -> bool:
    try:
        return EDGE * limit_of(dtype) <= abs(float(text)) < float("inf")
    except ValueError:
        return False


def absorbed_proof(seen: Observed[Absorbed]) -> str:
    """The float32 run of the ops between the overflow and the first finite result, as a clause."""
    born = seen.what.born
    return (
        f"{born.op} and what follows it up to {seen.what.op}, run again in float32, is finite everywhere: the result "
        f"reaches {born.float32:,.6g} where {born.dtype} overflows"
    )


def absorbed_evidence(seen: Observed[Absorbed]) -> Iterator[str]:
    """What was measured from the overflow to the first finite result."""
    born = seen.what.born
    # a cast of whole numbers, or what fills a tensor, has no operand of floating point
    gets = f"has operands up to {' and '.join(map(number, born.operands))}; " if born.operands else ""
    yield (
        f"{born.op} in {short(born.fqn)}: {gets}its result reaches {number(born.float32)}, "
        f"{max_of(born.dtype)}: {born.bad} of {born.elements} elements overflow."
    )
    yield from _to_the_first_finite(seen.what)


def _to_the_first_finite(what: Absorbed) -> Iterator[str]:
    if len(what.through) > 1:
        yield f"From there to the first finite result: {', '.join(what.through)}."
    yield f"The result of {what.op} differs from that of the same operations in float32 by {what.relative_error:.2g} times its largest magnitude."


def _use_behind(trace: Trace, born: Overflowed) -> RoundedUse | None:
    """The use of what an overflow has led to, where most of its digits are lost by then: of the one row of a norm that overflows, say, beside others that do not."""
    uses = (seen.what for seen in trace.observed(RoundedUse))
    return next(
        (use for use in uses if use.nonfinite and use.used_at and use.changed and use.made_at == born.source), None
    )


def _swallowed(trace: Trace, seen: Observed[Absorbed]) -> Finding:
    what, born = seen.what, seen.what.born
    used = _use_behind(trace, born)
    harmful = what.relative_error > HARMLESS or used is not None
    after = {overload_free(name) for name in what.through}
    takes_root = bool(after & ROOTS) or (overload_free(born.op) in LENGTHS and bool(after & DIVISIONS))
    norm = harmful and born.squares and takes_root
    if norm and born.of_gradients:
        where, cause = _GRADIENTS_OVERFLOW.format(born.dtype), CAUSE_IN_A_CLIPPING
        summary = f"{where} in step {seen.step}: {born.op} reaches {number(born.float32)}, {max_of(born.dtype)}."
    else:
        where = f"in {short(born.fqn)} {{}} {born.dtype} in step {seen.step}"
        error = what.relative_error
        off = f"off by {f'{percent(error)} of' if error <= 1 else f'{number(error)} times'} its largest magnitude"
        if error <= HARMLESS and used is not None:
            off = f"leads to {used.value} in the place of {used.exact}"
        if norm:
            summary = f"The squares {where.format('overflow')}: what the norm returns is finite, and {off}."
        else:
            ends = f"and wrong: {off}" if harmful else "the same as from the float32 value"
            summary = f"{born.op} {where.format('overflows')}, and {what.op} hides it: its result is finite {ends}."
        cause = (
            CAUSE_IN_A_NORM
            if norm
            else (
                f"{born.op}{at_line(born.source)} makes inf of finite operands; {what.op}{at_line(what.source)} makes finite values "
                "of the inf, so that no check for inf or NaN sees it."
            )
        )
    statement = Statement(
        id="norm-square-overflow" if norm else "float16-overflow",
        proven_by=absorbed_proof(seen),
        severity=Severity.ERROR if harmful else Severity.INFO,
        summary=summary,
        cause=cause,
        evidence=tuple(absorbed_evidence(seen)),
    )
    return make_finding(
        statement,
        phase=seen.phase,
        step=seen.step,
        fqn=born.fqn,
        op=born.op,
        dtype=born.dtype,
        source=born.source,
        cls=class_of(trace, born.fqn or ""),
    )


FLOAT8_RANGE = FindingSpec(
    id="float8-range",
    title="Values are cast to float8 without a scale that fits them",
    family=SILENT,
    references=(
        "https://github.com/NVIDIA/Megatron-LM/issues/442",
        "https://github.com/NVIDIA/TransformerEngine/pull/825",
        "https://github.com/pytorch/pytorch/pull/178817",
    ),
    do_this="Multiply by a scale before the cast to {dtype} (its largest value over the tensor's absmax), keep the scale, and divide by it after the cast back.",
)
_CASTS = frozenset({"_to_copy", "to", "copy_", "copy"})


def judge_float8(origin: Origin) -> Finding | None:
    """A cast to a float8 dtype that has inf, of values beyond its range."""
    op, dtype = origin.op, origin.result.dtype
    if not dtype.startswith("float8") or overload_free(op.op) not in _CASTS or not origin.leaves_a_narrow_range:
        return None
    statement = Statement(
        id="float8-range",
        proven_by=proof(origin),
        summary=f"A cast to {dtype} in {short(place(op))} overflows in step {op.step} ({op.phase}): {needs(origin)}.",
        cause=f"{_reach(dtype)} {op.op}{at_line(op.source)} casts larger values, and they become inf.",
        evidence=tuple(overflow_evidence(origin)),
    )
    return make_finding_at(origin, statement)


def detect_float8_casts(trace: Trace) -> Iterator[Finding]:
    """Casts to float8 that lose what a scale would keep; a line of code tells once of all its modules."""
    by_line: dict[tuple[str | None, str], list[Observed[Float8Cast]]] = {}
    for one in trace.observed(Float8Cast):
        by_line.setdefault((one.what.source, one.what.to), []).append(one)
    for seen, *others in by_line.values():
        what = seen.what
        statement = Statement(
            id="float8-range",
            proven_by=(
                f"the same values, multiplied by {limit_of(what.to):g} / absmax before the cast and divided after it, differ from what they were by "
                f"{what.scaled_error:.2g} of their norm, and as the program casts them by {what.relative_error:.2g}"
            ),
            summary=f"{short(seen.fqn)} casts {what.from_} to {what.to} without a scale that fits in step {seen.step}: {_lost(what)}.",
            cause=f"{_reach(what.to)} Values outside of that are clipped or become 0, and nothing raises.",
            evidence=(
                f"The largest magnitude before the cast is {number(what.absmax)}.",
                f"{what.clipped:,} of {what.elements:,} elements are clipped, {what.vanished:,} become 0.",
                *((f"The same line does so in {listed([named_module(o.fqn) for o in others])}.",) if others else ()),
            ),
        )
        yield make_finding_of(seen, statement, dtype=what.to, op=what.op, source=what.source)


def _reach(dtype: str) -> str:
    known = DTYPES[dtype]
    return f"{dtype} reaches from {known.smallest:.3g} to {known.max:,.6g}."


def _lost(what: Float8Cast) -> str:
    if what.clipped >= what.vanished:
        return f"{percent(what.clipped / what.elements)} of the elements become {limit_of(what.to):,.6g} or -{limit_of(what.to):,.6g}"
    return f"{percent(what.vanished / what.elements)} of the elements become 0"


RULES = (Rule(name="float8-casts", priority=120, specs=(FLOAT8_RANGE,), detect=detect_float8_casts),)
