"""Non-finite values that no recorded operator made: weights and inputs, numbers in the code, calls without an op trace, compiled code."""

import re
from dataclasses import replace

from dtypedoctor.diagnosis.incidents import GRADIENTS, Incident
from dtypedoctor.diagnosis.nonfinite_origin import NARROW, Origin, finite_in_eager_mode
from dtypedoctor.diagnosis.ops import is_uninitialized
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.wording import (
    bad_elements,
    class_of,
    compiled_outside,
    failing_line,
    how_the_run_ended,
    limit_of,
    max_of,
    module_of,
    modules_were_finite,
    operators_were_seen,
    place,
    rejection_in,
    short,
)
from dtypedoctor.rules import Statement, make_finding, make_finding_at
from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import SteppedBy

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
    where = f" at {finding.source}" if finding.source else ""
    if finding.cause == _WRITTEN:
        return f"Write a finite number{where}, or keep what is marked so out of what follows."
    if finding.cause == _UNWRITTEN:
        return f"Use `torch.zeros` in the place of `torch.empty`{where}, or write to all of it before it is used."
    return _IN_EAGER_MODE if any(text in finding.cause for text in (_MAYBE_COMPILED, _NOT_COMPILED)) else ""


def judge_written(origin: Origin) -> Finding | None:
    """The line that writes inf or NaN by name, or uses memory that nothing has written. What is written outside of all modules is data."""
    if not origin.written:
        return None
    op, result = origin.op, origin.result
    writer = f"The code of {short(place(op))}" if place(op) is not None else "The program"
    infinite = "inf" if result.num_posinf or not result.num_neginf else "-inf"
    what = "NaN" if result.num_nan else infinite
    if is_uninitialized(op):
        does, cause, held = "uses memory that it has not written", _UNWRITTEN, "hands out memory as it was"
    else:
        does, cause, held = f"writes {what} into a tensor", _WRITTEN, "writes it"
    statement = Statement(
        id="domain-error" if place(op) is not None else "nonfinite-input",
        summary=f"{writer} {does}, in step {op.step} ({op.phase}).",
        cause=cause,
        evidence=(
            f"{op.op} at {op.source} {held}: {bad_elements(result)} ({result.dtype}) are {what}, and no operator before it made any.",
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
                f"{bad_elements(tensor).capitalize()} of {name} were NaN or inf when {op.op} at {op.source} read it. An earlier "
                "run, a line of the program that writes them, a conversion to a narrower dtype, memory that was never written or a damaged file has left them so."
            ),
            evidence=(
                f"{name} {counted}",
                f"{op.op} at {op.source} is the first operator that uses it; no recorded operator wrote it.",
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
        summary=f"{f'The input {tensor.name} of {short(fqn)}' if is_input else 'A tensor'} that {op.op} at {op.source} uses is not finite already, in step {op.step}.",
        cause=_made_by(origin.trace, _IN_THE_DATA if is_input else _FROM_OUTSIDE)
        + (beyond if tensor.dtype in NARROW and not tensor.num_nan else ""),
        evidence=(
            f"{bad_elements(tensor)} {counted}",
            f"{op.op} at {op.source} is the first operator that uses it; no recorded operator produced it.",
            *how_the_run_ended(origin.trace),
        ),
    )
    # Data goes into the forward pass; a loss reads its targets there even where no module is open
    phase = "forward" if op.phase in ("backward", "optimizer") else op.phase
    return replace(make_finding_at(origin, statement), fqn=fqn, op=None, phase=phase)


_IN_THE_DATA = "The data holds NaN or inf before the model computes anything"
_FROM_OUTSIDE = (
    "No operator of torch has made it: it is data, or comes from code that torch does not see, such as numpy's"
)


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
        made = f"{op} at {source} is the first operator outside of modules seen to output one" if op else NO_OPS
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
