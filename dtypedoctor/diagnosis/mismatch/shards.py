"""FSDP units that hold parameters of more than one dtype."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.mismatch.messages import complaint_of
from dtypedoctor.diagnosis.observations import observed
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import how_the_run_ended, listed, short
from dtypedoctor.trace.events import Observation, Raised
from dtypedoctor.trace.reader import Trace

__all__ = ["mixed_shard_units"]

FSDP2 = "fully_shard"


def mixed_shard_units(trace: Trace) -> Iterator[Finding]:
    """FSDP has refused a unit because its parameters (or gradients) do not have one dtype, or is going to.

    ``fully_shard`` takes any parameters, and refuses them when the unit is first called: what it was given is enough to tell.
    """
    raised = trace.last(Raised)
    complaint = complaint_of(raised.message) if raised is not None else None
    if raised is not None and complaint is not None and complaint.family == "shards":
        yield _finding(trace, _mixed(trace), raised)
    elif not any(observed(trace, "shard-unit")):  # no unit has been called yet
        call = next(
            (o for o in observed(trace, "shard-call") if o.values["api"] == FSDP2 and len(_dtypes(o)) > 1), None
        )
        if call is not None:
            yield _finding(trace, call, None)


def _mixed(trace: Trace) -> Observation | None:
    """The unit that was refused: known by its name where it has been called, else from the call that made it."""
    units = [o for kind in ("shard-unit", "shard-call") for o in observed(trace, kind)]
    return next((unit for unit in units if len(_dtypes(unit)) > 1), None)


def _dtypes(unit: Observation) -> dict[str, list[str]]:
    """Names of parameters by dtype, of those that have to agree: FSDP2 asks it of trainable ones only."""
    held = unit.values.get("dtypes", {})
    return dict(held if unit.values.get("api", FSDP2) != FSDP2 else unit.values.get("trainable", held))


def _finding(trace: Trace, unit: Observation | None, raised: Raised | None) -> Finding:
    dtypes = _dtypes(unit) if unit is not None else {}
    fqn = unit.fqn if unit is not None else None
    if fqn is None and raised is not None and raised.modules:
        fqn = raised.modules[-1]
    name = short(fqn) if fqn is not None else str(unit.values.get("cls") if unit is not None else "of FSDP")
    statement = Statement(
        id="fsdp-mixed-dtypes",
        confidence=Confidence.LIKELY,
        summary=f"The shard unit {name} holds parameters of {' and '.join(dtypes) or 'more than one dtype'}.",
        cause=(
            "FSDP puts the parameters of a unit into one flat buffer, which has one dtype. Adapters, norms kept in float32 and "
            "4-bit storage (whose storage dtype counts) are the usual exceptions inside a unit of half-precision weights."
        ),
        evidence=tuple(_evidence(trace, dtypes, raised)),
    )
    sources = (o.values["source"] for o in observed(trace, "shard-call") if _dtypes(o) and _same(o, dtypes))
    return located(
        statement,
        phase=raised.phase if raised is not None else "static",
        step=raised.step if raised is not None else None,
        fqn=fqn,
        dtype=min(dtypes, key=lambda dtype: len(dtypes[dtype])) if dtypes else None,
        source=next(sources, None),
    )


def _evidence(trace: Trace, dtypes: dict[str, list[str]], raised: Raised | None) -> Iterator[str]:
    for dtype, names in dtypes.items():
        yield f"{dtype}: {listed(sorted(names))}."
    yield from how_the_run_ended(trace)
    if raised is None:
        yield "The unit has not been called: FSDP2 refuses the mixture in the first forward pass."


def _same(call: Observation, dtypes: dict[str, list[str]]) -> bool:
    """Whether a call made the unit with these parameters; its names are relative to that unit."""
    made = _dtypes(call)
    return made.keys() == dtypes.keys() and all(
        any(name == own or name.endswith(f".{own}") for name in dtypes[dtype]) for dtype in made for own in made[dtype]
    )
