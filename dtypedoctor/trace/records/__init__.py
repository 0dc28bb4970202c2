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
from dtypedoctor.trace.records import execution, models, silent

RECORDS: dict[str, type[Any]] = {
    record.KIND: record
    for module in (execution, models, silent)
    for record in vars(module).values()
    if hasattr(record, "KIND")
}
"""Every record by its kind. A class with a ``KIND`` in one of these modules is one."""


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
