"""Units of FSDP whose tensors do not have one dtype."""

from collections import defaultdict
from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.rule import Rule
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.subject import StaticTensor, Subject
from dtypedoctor.diagnosis.wording import listed
from dtypedoctor.rules.mismatch.rule import FSDP_MIXED_DTYPES

ID = "fsdp-mixed-dtypes"


def check_sharding(subject: Subject) -> Iterator[Finding]:
    """Mixed units: an error where the model is to be sharded, else worth knowing."""
    wanted = subject.intent.fsdp
    mixed = {unit: dtypes for unit, dtypes in _units(subject).items() if len(dtypes) > 1}
    if not mixed:
        return
    unit, dtypes = next(iter(mixed.items()))
    said = Statement(
        id=ID,
        severity=Severity.ERROR if wanted else Severity.INFO,
        confidence=Confidence.LIKELY if wanted else Confidence.POSSIBLE,
        summary=f"{len(mixed)} unit(s) hold parameters of several dtypes, which FSDP does not shard together.",
        cause="FSDP1 flattens a unit's parameters into one tensor, and FSDP2 gathers them as one: both need one dtype in each "
        "unit. The packed bytes of 4-bit weights count with their storage dtype.",
        evidence=tuple(_evidence(unit, dtypes)),
    )
    yield located(said, phase="static", fqn=unit)


def _evidence(unit: str, dtypes: dict[str, list[StaticTensor]]) -> Iterator[str]:
    for dtype, tensors in sorted(dtypes.items(), key=lambda item: -len(item[1])):
        names = [tensor.name.removeprefix(f"{unit}.") for tensor in tensors]
        yield f"{unit or 'Outside of all layers'}: {len(tensors)} tensor(s) are {dtype}: {listed(names)}."


def _units(subject: Subject) -> dict[str, dict[str, list[StaticTensor]]]:
    """Parameters by unit and dtype. A unit is a repeated layer, as wrapping policies take them; the rest is one more."""
    units: dict[str, dict[str, list[StaticTensor]]] = defaultdict(lambda: defaultdict(list))
    for tensor in subject.tensors:
        if not tensor.name.endswith("inv_freq"):
            units[_unit(tensor.name)][subject.in_memory(tensor)].append(tensor)
    return units


def _unit(name: str) -> str:
    """The name up to its first number: ``model.layers.3`` of ``model.layers.3.mlp.up_proj.weight``."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: first + 1]) if first is not None else ""


RULES = (Rule(name="shard-units", specs=(FSDP_MIXED_DTYPES,), inspect=check_sharding),)
