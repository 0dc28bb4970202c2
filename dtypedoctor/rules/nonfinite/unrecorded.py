"""Non-finite values that no recorded operator made: weights and inputs, numbers in the code, calls without an op trace, compiled code."""

from dataclasses import replace

from dtypedoctor.diagnosis.incidents import GRADIENTS, Incident, Reached
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
from dtypedoctor.trace.events import Op, Sample, Site, TensorNote
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
    if is_uninitialized(op):
        does, cause, held = "uses memory that it has not written", _UNWRITTEN, "hands out memory as it was"
    else:
        does, cause, held = f"writes {_what(result)} into a tensor", _WRITTEN, "writes it"
    statement = Statement(
        id="domain-error" if place(op) is not None else "nonfinite-input",
        confidence=Confidence.LIKELY,
        summary=f"{writer} {does}, in step {op.step} ({op.phase}).",
        cause=cause,
        evidence=(
            f"{op.op} at {op.source} {held}: {bad_elements(result)} ({result.dtype}) are {_what(result)}, and no operator before it made any.",
            *how_the_run_ended(origin.trace),
        ),
    )
    return make_finding_at(origin, statement)


def _what(tensor: TensorNote) -> str:
    infinite = "inf" if tensor.num_posinf or not tensor.num_neginf else "-inf"
    return "NaN" if tensor.num_nan else infinite


def judge_given(origin: Origin) -> Finding | None:
    """An operand that no op of the watched part has made."""
    if origin.given is None:
        return None
    return _of_model(origin, origin.given) if origin.given.origin in HELD else _of_batch(origin, origin.given)


def _of_model(origin: Origin, tensor: TensorNote) -> Finding:
    op = origin.op
    name = tensor.name or "a tensor of the model"
    statement = Statement(
        id="nonfinite-parameters",
        confidence=Confidence.LIKELY,
        summary=f"The {tensor.origin} {name} is not finite before step {op.step} uses it.",
        cause=(
            f"{bad_elements(tensor).capitalize()} of {name} were NaN or inf when {op.op} at {op.source} read it. An earlier "
            "run, a line of the program that writes them, a conversion to a narrower dtype, memory that was never written or a damaged file has left them so."
        ),
        evidence=(
            f"{name} ({tensor.dtype}): {tensor.num_nan} NaN, {tensor.num_posinf + tensor.num_neginf} inf.",
            f"{op.op} at {op.source} is the first operator that uses it; no recorded operator wrote it.",
            *how_the_run_ended(origin.trace),
        ),
    )
    return replace(make_finding_at(origin, statement), fqn=module_of(name), op=None, phase="static", source=None)


_IN_THE_DATA = "The data holds NaN or inf before the model computes anything"
_FROM_OUTSIDE = (
    "No operator of torch has made it: it is data, or comes from code that torch does not see, such as numpy's"
)


def _of_batch(origin: Origin, tensor: TensorNote) -> Finding:
    op, seen = origin.op, operators_were_seen(origin.trace)
    what = f"The input {tensor.name} of {short(_outermost(origin))}" if tensor.origin == "input" else "A tensor"
    statement = Statement(
        id="nonfinite-input",
        confidence=Confidence.LIKELY if seen else Confidence.POSSIBLE,
        summary=f"{what} that {op.op} at {op.source} uses is not finite already, in step {op.step}.",
        cause=f"{_made_by(origin.trace, _IN_THE_DATA if tensor.origin == 'input' else _FROM_OUTSIDE)}{_cast(tensor)}",
        evidence=(
            f"{bad_elements(tensor)} ({tensor.dtype}): {tensor.num_nan} NaN, {tensor.num_posinf + tensor.num_neginf} inf.",
            f"{op.op} at {op.source} is the first operator that uses it; no recorded operator produced it.",
            *how_the_run_ended(origin.trace),
        ),
    )
    fqn = _outermost(origin) if tensor.origin == "input" else place(op)
    return replace(make_finding_at(origin, statement), fqn=fqn, op=None, phase=_phase(op))


def _made_by(trace: Trace, made: str) -> str:
    """Where a value comes from that no recorded operator has made: known where enough was recorded."""
    if operators_were_seen(trace):
        return f"{made}, so no dtype of the model can help."
    where = "in a compiled function, say" if compiled_outside(trace) else "in a module call that was not measured, say"
    return f"No recorded operator has made it. {_MAYBE_COMPILED}: {where}."


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


CONVERSION_FAILED = (
    "cannot be converted to type at::Half without overflow",
    "cannot be converted to type c10::Half without overflow",
)


def judge_constant(trace: Trace) -> Finding | None:
    """The number that ended the run because float16 does not hold it, such as the ``-1e9`` of a mask."""
    raised = rejection_in(trace)
    if raised is None or not any(text in raised.message for text in CONVERSION_FAILED):
        return None
    fqn = raised.modules[-1] if raised.modules else None
    what = raised.op or "an operation"
    statement = Statement(
        id="float16-overflow",
        confidence=Confidence.LIKELY,
        summary=f"{what} in {short(fqn)} gets a number that float16 cannot hold, in step {raised.step} ({raised.phase}).",
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
    came_in = site.kind == "output" and _input_was_bad(trace, sample, site)
    fqn = _fqn(site, came_in=came_in)
    if came_in and site.phase == "forward" and _outermost_was_given_it(trace, sample, site):
        return _of_the_input(trace, incident, sample, site)
    statement = Statement(
        id=_finding_id(trace, site),
        confidence=Confidence.POSSIBLE,
        summary=f"{_first_seen(trace, site, fqn)} is where {site.dtype} first stops being finite, in step {sample.step} ({incident.phase}).",
        cause=f"The first inf or NaN was seen {_where(trace, site)}; {NO_OPS}.",
        evidence=(
            (
                f"{sample.num_nan} NaN and {sample.num_inf} inf; largest finite magnitude {sample.absmax:.6g} "
                f"({max_of(site.dtype)})."
            ),
            *(
                (("Its input was already not finite." if came_in else "Its input was finite."),)
                if site.kind == "output"
                else ()
            ),
            *how_the_run_ended(trace),
        ),
    )
    cls = class_of(trace, fqn or "")
    return make_finding(statement, phase=incident.phase, step=sample.step, fqn=fqn, dtype=site.dtype, cls=cls)


def _of_the_input(trace: Trace, incident: Incident, sample: Sample, site: Site) -> Finding:
    statement = Statement(
        id="nonfinite-input",
        confidence=Confidence.LIKELY if operators_were_seen(trace) else Confidence.POSSIBLE,
        summary=f"The model's input is already not finite, in step {sample.step}.",
        cause=_made_by(trace, _IN_THE_DATA),
        evidence=(
            f"{short(site.fqn)} is the first module to output it: {sample.num_nan} NaN and {sample.num_inf} inf.",
            "The outermost module was called with a tensor that is not finite.",
            *how_the_run_ended(trace),
        ),
    )
    return make_finding(
        statement, phase=incident.phase, step=sample.step, fqn="", dtype=site.dtype, cls=class_of(trace, "")
    )


def _outermost_was_given_it(trace: Trace, sample: Sample, site: Site) -> bool:
    """Whether the outermost module of the same call has output something bad as well, and had a bad input."""
    outermost = ("input", site.root, "")
    given = (later for later, other in trace.measured() if (other.kind, other.root, other.fqn) == outermost)
    return any(later.n >= sample.n and later.call == sample.call and not later.finite for later in given)


def _outside(trace: Trace, incident: Incident) -> Finding:
    if incident.reached is not None:
        return _read(trace, incident.reached)
    statement = Statement(
        id="domain-error",
        confidence=Confidence.POSSIBLE,
        summary=f"Code outside of all modules rejected a value that is not finite, in step {incident.step} ({incident.phase}).",
        cause=f"{_capital(modules_were_finite(trace))}; {NO_OPS}.",
        evidence=how_the_run_ended(trace),
    )
    return make_finding(statement, phase=incident.phase, step=incident.step)


def _read(trace: Trace, value: Reached) -> Finding:
    seen = value.seen
    operators = ((sample, site) for sample, site in trace.measured() if site.kind == "operator")
    first = next((site for sample, site in operators if not sample.finite), None)
    op, _, source = first.fqn.partition(" ") if first is not None else (None, "", None)
    made = (
        f"{op} at {source} is the first operator outside of modules seen to output one."
        if first is not None
        else f"{NO_OPS}."
    )
    statement = Statement(
        id="domain-error",
        confidence=Confidence.POSSIBLE,
        summary=f"A value that is not finite {value.got} in step {seen.step} ({seen.phase}).",
        cause=f"The value was computed outside of all modules{_or_compiled(trace)}; {made}",
        evidence=how_the_run_ended(trace),
    )
    return make_finding(statement, phase=seen.phase, step=seen.step, op=op, source=source or value.source)


def _finding_id(trace: Trace, site: Site) -> str:
    if site.dtype != "float16":
        return "domain-error"
    if site.kind == "param":
        return "optimizer-epsilon-underflow" if site.phase == "optimizer" and _divides(trace) else "float16-overflow"
    return "backward-overflow" if site.kind in GRADIENTS else "float16-overflow"


def _divides(trace: Trace) -> bool:
    """Whether an optimizer may have an epsilon; also where it is not known which there are."""
    steppers = [seen.what for seen in trace.observed(SteppedBy)]
    return not steppers or any(one.eps for one in steppers)


def _fqn(site: Site, *, came_in: bool) -> str | None:
    if site.kind == "loss" or (site.kind == "accumulated" and not site.root):
        return None
    if site.kind in ("param", "grad"):
        return module_of(site.fqn)
    return module_of(site.fqn) if came_in else site.fqn


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _or_compiled(trace: Trace) -> str:
    return f", or is {_NOT_COMPILED}, which was not measured" if compiled_outside(trace) else ""


def _first_seen(trace: Trace, site: Site, fqn: str | None) -> str:
    """Where a value was first seen: what was computed before it, outside of all modules or in compiled code, is not known apart."""
    return "The loss" if site.kind == "loss" and compiled_outside(trace) else short(fqn)


def _where(trace: Trace, site: Site) -> str:
    if site.kind == "loss":
        return f"in the loss, and {modules_were_finite(trace)}"
    return f"at {short(site.fqn)}"


def _input_was_bad(trace: Trace, sample: Sample, site: Site) -> bool:
    """Whether an input of the module was not finite either; inputs are measured right after a bad output."""
    own = ("input", site.root, site.fqn)
    inputs = (later for later, other in trace.measured() if (other.kind, other.root, other.fqn) == own)
    return next((not later.finite for later in inputs if later.n >= sample.n and later.call == sample.call), False)


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
