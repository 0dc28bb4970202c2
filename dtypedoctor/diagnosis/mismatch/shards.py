"""FSDP units that hold parameters of more than one dtype."""

from collections.abc import Iterator, Mapping

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.mismatch.messages import complaint_of
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import how_the_run_ended, listed, short
from dtypedoctor.trace.events import Observed, Raised
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.models import ShardCall, ShardUnit

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
    elif not trace.observed(ShardUnit):  # no unit has been called yet
        calls = (o for o in trace.observed(ShardCall) if o.what.api == FSDP2)
        call = next((o for o in calls if len(_dtypes(o.what)) > 1), None)
        if call is not None:
            yield _finding(trace, call, None)


def _mixed(trace: Trace) -> Observed[ShardUnit | ShardCall] | None:
    """The unit that was refused: known by its name where it has been called, else from the call that made it."""
    units: tuple[Observed[ShardUnit | ShardCall], ...] = (*trace.observed(ShardUnit), *trace.observed(ShardCall))
    return next((unit for unit in units if len(_dtypes(unit.what)) > 1), None)


def _dtypes(unit: ShardUnit | ShardCall) -> Mapping[str, list[str]]:
    """Names of parameters by dtype, of those that have to agree: FSDP2 asks it of trainable ones only."""
    is_first = isinstance(unit, ShardCall) and unit.api != FSDP2
    return unit.dtypes if is_first or unit.trainable is None else unit.trainable


def _finding(trace: Trace, unit: Observed[ShardUnit | ShardCall] | None, raised: Raised | None) -> Finding:
    dtypes = _dtypes(unit.what) if unit is not None else {}
    fqn = unit.fqn if unit is not None else None
    if fqn is None and raised is not None and raised.modules:
        fqn = raised.modules[-1]
    cls = unit.what.cls if unit is not None and isinstance(unit.what, ShardCall) else "of FSDP"
    name = short(fqn) if fqn is not None else cls
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
    calls = (seen.what for seen in trace.observed(ShardCall))
    sources = (call.source for call in calls if _dtypes(call) and _same(call, dtypes))
    return located(
        statement,
        phase=raised.phase if raised is not None else "static",
        step=raised.step if raised is not None else None,
        fqn=fqn,
        dtype=min(dtypes, key=lambda dtype: len(dtypes[dtype])) if dtypes else None,
        source=next(sources, None),
    )


def _evidence(trace: Trace, dtypes: Mapping[str, list[str]], raised: Raised | None) -> Iterator[str]:
    for dtype, names in dtypes.items():
        yield f"{dtype}: {listed(sorted(names))}."
    yield from how_the_run_ended(trace)
    if raised is None:
        yield "The unit has not been called: FSDP2 refuses the mixture in the first forward pass."


def _same(call: ShardCall, dtypes: Mapping[str, list[str]]) -> bool:
    """Whether a call made the unit with these parameters; its names are relative to that unit."""
    made = _dtypes(call)
    return made.keys() == dtypes.keys() and all(
        any(name == own or name.endswith(f".{own}") for name in dtypes[dtype]) for dtype in made for own in made[dtype]
    )
