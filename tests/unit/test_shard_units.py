"""Shard units with parameters of several dtypes, found from what FSDP is given."""

from typing import Any

import pytest
from traces import TraceBuilder

from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.rules.mismatch.operands import mixed_shard_units
from dtypedoctor.trace.events import Observation, Raised

MIXED = {"bfloat16": ["0.weight", "0.bias"], "float32": ["1.weight"]}
UNIFORM = {"bfloat16": ["0.weight", "0.bias", "1.weight"]}
REFUSAL = "FSDP expects uniform original parameter dtype but got {torch.float32, torch.bfloat16}"


def unit(kind: str, fqn: str | None, **values: Any) -> Observation:
    """A unit as the instruments note it: ``shard-call`` when it is made, ``shard-unit`` when it is first called."""
    return Observation(n=1, step=1, call=0, phase="forward", kind=kind, fqn=fqn, values=values)


def made(
    dtypes: dict[str, list[str]], trainable: dict[str, list[str]] | None = None, api: str = "fully_shard"
) -> Observation:
    """The call that makes a unit."""
    return unit(
        "shard-call", None, api=api, cls="Block", source="train.py:9", dtypes=dtypes, trainable=trainable or dtypes
    )


def found(*records: Any) -> tuple[Finding, ...]:
    return tuple(mixed_shard_units(TraceBuilder().add(*records).build()))


def refused(modules: list[str]) -> Raised:
    """FSDP2's complaint in the first forward pass."""
    return Raised(
        n=9, step=1, call=1, phase="forward", type="AssertionError", message=REFUSAL, frames=[], modules=modules
    )


def test_a_mixed_unit_is_found_when_it_is_made() -> None:
    """Long before its first forward pass, in which FSDP2 would refuse it."""
    (finding,) = found(made(UNIFORM), made(MIXED))
    assert (finding.id, finding.phase, finding.step) == ("fsdp-mixed-dtypes", "static", None)
    assert (finding.dtype, finding.source) == ("float32", "train.py:9")
    assert "The shard unit Block holds parameters of bfloat16 and float32." in finding.summary
    assert "float32: 1.weight." in finding.evidence


def test_a_refusal_is_told_with_the_units_name_and_the_call_that_made_it() -> None:
    """The name is known once the unit has been called."""
    full = {dtype: [f"layers.3.{name}" for name in names] for dtype, names in MIXED.items()}
    called = unit("shard-unit", "layers.3", root=0, dtypes=full, trainable=full)
    (finding,) = found(made(UNIFORM), made(MIXED), called, refused(["", "layers.3"]))
    assert (finding.fqn, finding.phase, finding.step) == ("layers.3", "forward", 1)
    assert finding.source == "train.py:9"


def test_a_refusal_without_any_note_names_the_module_that_raised() -> None:
    """As in a trace of a program that bound ``fully_shard`` before the watch began."""
    (finding,) = found(refused(["", "layers.3"]))
    assert (finding.fqn, finding.dtype, finding.source) == ("layers.3", None, None)


@pytest.mark.parametrize(
    "records",
    [
        (made(UNIFORM),),
        (made(MIXED, trainable={"bfloat16": ["0.weight", "0.bias"]}),),
        (made(MIXED, api="FullyShardedDataParallel"),),
        (made(MIXED), unit("shard-unit", "layers.3", root=0, dtypes=UNIFORM, trainable=UNIFORM)),
    ],
    ids=["one dtype", "the odd one is frozen", "FSDP1 has not refused it", "cast before the first forward"],
)
def test_what_fsdp_takes_is_no_finding(records: tuple[Observation, ...]) -> None:
    """FSDP2 asks trainable parameters only, and only at the first forward pass."""
    assert found(*records) == ()
