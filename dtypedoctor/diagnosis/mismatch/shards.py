"""FSDP units that hold parameters of more than one dtype."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.mismatch.messages import complaint_of
from dtypedoctor.diagnosis.prescriptions import remedies_for
from dtypedoctor.diagnosis.references import references_of
from dtypedoctor.diagnosis.wording import how_the_run_ended, listed, short
from dtypedoctor.trace.events import Observation, Raised
from dtypedoctor.trace.reader import Trace

__all__ = ["mixed_shard_units"]


def mixed_shard_units(trace: Trace) -> Iterator[Finding]:
    """FSDP has refused a unit because its parameters (or gradients) do not have one dtype."""
    raised = trace.last(Raised)
    complaint = complaint_of(raised.message) if raised is not None else None
    if raised is None or complaint is None or complaint.family != "shards":
        return
    units = [o for o in trace.all(Observation) if o.kind == "shard-unit"]
    mixed = next((unit for unit in units if len(unit.values.get("dtypes", {})) > 1), None)
    dtypes = dict(mixed.values["dtypes"]) if mixed is not None else {}
    unit = mixed.fqn if mixed is not None else (raised.modules[-1] if raised.modules else None)
    minority = min(dtypes, key=lambda d: len(dtypes[d])) if dtypes else None
    yield Finding(
        id="fsdp-mixed-dtypes",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        fqn=unit,
        phase=raised.phase,
        step=raised.step,
        dtype=minority,
        summary=f"The shard unit {short(unit)} holds parameters of {' and '.join(dtypes) or 'more than one dtype'}.",
        cause=(
            "FSDP puts the parameters of a unit into one flat buffer, which has one dtype. Adapters, norms kept in float32 and "
            "4-bit storage (whose storage dtype counts) are the usual exceptions inside a unit of half-precision weights."
        ),
        evidence=(
            *(f"{dtype}: {listed(sorted(names))}." for dtype, names in dtypes.items()),
            *how_the_run_ended(trace),
        ),
        remedies=remedies_for("fsdp-mixed-dtypes"),
        references=references_of("fsdp-mixed-dtypes"),
    )
