"""Values that leave the range of their dtype, and values that no dtype can hold."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.modules import class_of, first_nonfinite
from dtypedoctor.diagnosis.ops import OpGraph
from dtypedoctor.diagnosis.prescriptions import remedies_for
from dtypedoctor.dtypes import DTYPES, short_name
from dtypedoctor.trace.events import Op, Raised, Replay, Sample, Site
from dtypedoctor.trace.reader import Trace

NARROW = frozenset({"float16", "float8_e5m2", "float8_e4m3fn"})
"""Dtypes whose range is smaller than float32's. A value that float32 cannot hold is no precision problem."""

REFERENCES = ("https://github.com/unslothai/unsloth-zoo/pull/600",)


def detect_overflow(trace: Trace) -> Iterator[Finding]:
    """The op that first turned finite operands into inf or NaN; falls back to the module where there is no op trace."""
    first = first_nonfinite(trace)
    if first is None:
        return
    sample, site = first
    graph = OpGraph(trace)
    births = graph.births_before(sample)
    origin = next((op for op in births if any(t.absmax is not None for t in op.inputs)), None)
    if origin is None:
        yield _by_module(trace, sample, site)
        return
    replay = graph.replay(origin, "float32", "float64")
    dtype = origin.outputs[0].dtype
    if replay is not None and replay.finite and dtype in NARROW:
        yield _overflow(trace, origin, replay, site)
    elif replay is not None and not replay.note:
        yield _domain_error(origin, replay, site)
    else:
        yield _by_module(trace, sample, site)


def _overflow(trace: Trace, op: Op, replay: Replay, seen: Site) -> Finding:
    dtype = op.outputs[0].dtype
    limit = DTYPES[dtype].max
    operands = " and ".join(f"{t.absmax:.6g}" for t in op.inputs if t.absmax is not None)
    result = op.outputs[0]
    count = result.num_posinf + result.num_neginf + result.num_nan
    proven = replay.absmax is not None and replay.absmax > limit
    return Finding(
        id="float16-overflow",
        severity=Severity.ERROR,
        confidence=Confidence.PROVEN if proven else Confidence.LIKELY,
        fqn=op.fqn,
        op=op.op,
        phase=op.phase,
        step=op.step,
        dtype=dtype,
        source=op.source,
        summary=(
            f"{_short(op.fqn)} overflows {dtype} in step {op.step} ({op.phase}): {op.op} needs {replay.absmax:.6g}, "
            f"{dtype} ends at {limit:.6g}."
        ),
        cause=(
            f"{op.op} at {op.source} multiplies or adds finite operands whose result is larger than the largest finite "
            f"{dtype} value, {limit:.6g}, and becomes inf. Modules after it only pass the inf on."
        ),
        evidence=tuple(_evidence(trace, op, replay, operands, count, seen)),
        remedies=remedies_for("float16-overflow", class_of(trace, op.fqn)),
        references=REFERENCES,
    )


def _evidence(trace: Trace, op: Op, replay: Replay, operands: str, count: int, seen: Site) -> Iterator[str]:
    dtype = op.outputs[0].dtype
    limit = DTYPES[dtype].max
    elements = _elements(op.outputs[0].shape)
    yield f"The operands of {op.op} are finite: absmax {operands} (largest {dtype}: {limit:.6g})."
    yield f"{count} of {elements} elements of its {short_name(dtype)} result are inf or NaN."
    yield f"The same op on the same operands in {replay.how} is finite, absmax {replay.absmax:.6g}."
    if seen.fqn != op.fqn:
        yield f"{_short(seen.fqn)} ({seen.cls}) is the first module that returns the bad value; it only passes it on."
    raised = trace.last(Raised)
    if raised is not None:
        first_line = raised.message.splitlines()[0] if raised.message else ""
        yield f"The run ended in step {raised.step} ({raised.phase}) with {raised.type}: {first_line[:200]}"


def _domain_error(op: Op, replay: Replay, seen: Site) -> Finding:
    return Finding(
        id="domain-error",
        severity=Severity.ERROR,
        confidence=Confidence.PROVEN,
        fqn=op.fqn,
        op=op.op,
        phase=op.phase,
        step=op.step,
        dtype=op.outputs[0].dtype,
        source=op.source,
        summary=f"{op.op} in {_short(op.fqn)} has no finite float32 result for its operands.",
        cause="The operation is not defined for these operands (a division by zero, the logarithm of a negative number …) "
        "or its result is larger than float32 can hold. This is not a mixed-precision problem.",
        evidence=(
            f"The same op on the same operands in {replay.how} is {'finite' if replay.finite else 'not finite either'}.",
        ),
    )


def _by_module(trace: Trace, sample: Sample, site: Site) -> Finding:
    outside = next(
        (s for s in trace.samples if s.n > sample.n and s.call == sample.call and _is_input_of(trace, s, site)), None
    )
    came_in = outside is not None and not outside.finite
    fqn = site.fqn.rpartition(".")[0] if came_in else site.fqn
    limit = DTYPES[site.dtype].max if site.dtype in DTYPES else float("inf")
    return Finding(
        id="float16-overflow" if site.dtype == "float16" else "domain-error",
        severity=Severity.ERROR,
        confidence=Confidence.POSSIBLE,
        fqn=fqn,
        phase=site.phase,
        step=sample.step,
        dtype=site.dtype,
        summary=f"{_short(fqn)} is where {site.dtype} first stops being finite, in step {sample.step} ({site.phase}).",
        cause=f"The first inf or NaN was seen at {_short(site.fqn)}; no op trace says which operation made it.",
        evidence=(
            (
                f"{sample.num_nan} NaN and {sample.num_inf} inf; largest finite magnitude {sample.absmax:.6g} "
                f"(largest {site.dtype}: {limit:.6g})."
            ),
            "Its input was already not finite." if came_in else "Its input was finite.",
        ),
        remedies=remedies_for("float16-overflow", class_of(trace, fqn)) if site.dtype == "float16" else (),
    )


def _is_input_of(trace: Trace, sample: Sample, site: Site) -> bool:
    other = trace.sites[sample.site]
    return other.kind == "input" and other.fqn == site.fqn


def _elements(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _short(fqn: str | None) -> str:
    """The tail of a dotted name that a person recognises."""
    parts = (fqn or "the code outside of any module").split(".")
    return ".".join(parts[-3:])
