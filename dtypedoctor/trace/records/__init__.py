"""What specialised instruments observe: a frozen dataclass for each kind, and the one codec between these and the lines of a trace.

A record names its kind on disk in ``KIND``. A field whose name is a keyword of Python ends in ``_``, which is left out on disk. Instruments on the torch side make records and detectors read them, so that nothing here
knows either side. A record of a kind that is not listed here, or that lacks a field, stays a raw
:class:`~dtypedoctor.trace.events.Observation`.
"""

from dataclasses import asdict
from keyword import iskeyword
from typing import Any

from dtypedoctor.trace.decode import decode
from dtypedoctor.trace.events import Observation, Observed
from dtypedoctor.trace.records.autocast import AutocastRegion, CustomFunction, OpenRegions
from dtypedoctor.trace.records.compiling import (
    CompileCounts,
    EagerCall,
    GraphBreak,
    Recompiled,
    RecompileLimit,
    StreamLaunches,
)
from dtypedoctor.trace.records.loading import Pretrained, RoundedAndTrained, StateLoaded
from dtypedoctor.trace.records.models import ModelConfig, ProcessGroup, ShardCall, ShardUnit
from dtypedoctor.trace.records.packed import PackedBits, PackedWeight
from dtypedoctor.trace.records.silent import (
    Absorbed,
    FirstRatio,
    FloatToInt,
    GradientZeros,
    RotaryTable,
    RoundedPositions,
    RouterChoice,
    ScaledBackward,
    StaleCopy,
    Twins,
    Unpatched,
    Updates,
)
from dtypedoctor.trace.records.values import AttentionReplayed, NonfiniteReached, Unscaled

__all__ = ["RECORDS", "from_disk", "to_disk"]

RECORDS: dict[str, type[Any]] = {
    record.KIND: record
    for record in (
        Absorbed,
        AttentionReplayed,
        NonfiniteReached,
        Unscaled,
        AutocastRegion,
        CompileCounts,
        CustomFunction,
        EagerCall,
        FirstRatio,
        FloatToInt,
        GradientZeros,
        GraphBreak,
        ModelConfig,
        OpenRegions,
        PackedBits,
        PackedWeight,
        Pretrained,
        ProcessGroup,
        RecompileLimit,
        Recompiled,
        RotaryTable,
        RoundedAndTrained,
        RoundedPositions,
        RouterChoice,
        ScaledBackward,
        ShardCall,
        ShardUnit,
        StaleCopy,
        StateLoaded,
        StreamLaunches,
        Twins,
        Unpatched,
        Updates,
    )
}
"""Every record by its kind."""


def from_disk(raw: Observation) -> Observation | Observed[Any]:
    """The typed observation; ``raw`` itself where its kind is unknown, or its values are not those of the kind."""
    record = RECORDS.get(raw.kind)
    if record is None:
        return raw
    try:
        what = decode(record, {f"{name}_" if iskeyword(name) else name: value for name, value in raw.values.items()})
    except (TypeError, ValueError):
        return raw
    # older traces leave an empty name out of the coordinates, and repeat it among the values
    fqn = raw.values.get("fqn", raw.fqn)
    return Observed(n=raw.n, step=raw.step, call=raw.call, phase=raw.phase, what=what, fqn=fqn)


def to_disk(observed: Observed[Any]) -> Observation:
    """The observation as it is written."""
    what = observed.what
    values = {name.removesuffix("_"): value for name, value in asdict(what).items()}
    return Observation(n=observed.n, step=observed.step, call=observed.call, phase=observed.phase, kind=what.KIND,
                       values=values, fqn=observed.fqn)  # fmt: skip
