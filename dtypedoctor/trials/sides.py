"""Describes a run that is compared: what it measured, what it ran on, what it was asked to do and how it ended."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dtypedoctor.analysis import How, ending_of
from dtypedoctor.runner.run import SavedRun
from dtypedoctor.trials.alignment import ALIGNED
from dtypedoctor.trials.comparison import Setting, Side

__all__ = ["describe", "differing", "end_of", "settings_of"]

_ABOUT = frozenset({"name", "summary", "references", "expect", "remedies", "reference", "time_limit", "watch_every"})
"""What a scenario says about itself and its treatment; none of it changes the run."""


def describe(saved: SavedRun) -> Side:
    """One side of a comparison."""
    trace = saved.run.trace
    sites = [site for site in trace.sites.values() if site.kind in ALIGNED]
    known = {site.id for site in sites}
    outputs = [site for site in sites if site.kind == "output"]
    return Side(
        label=saved.label,
        watched=trace.header is not None and trace.header.watched,
        complete=trace.end is not None,
        tensors=sum(sample.site in known for sample in trace.samples),
        modules=len({(site.root, site.fqn) for site in outputs}),
        steps_completed=trace.steps_done,
        ended=ending_of(saved.run).words,
        device="+".join(sorted({site.device for site in sites})),
        dtypes=tuple(name for name, _ in Counter(site.dtype for site in outputs).most_common()),
        damage=(*trace.damage, *([trace.folded.describe()] if trace.folded is not None else ())),
    )


def end_of(saved: SavedRun) -> tuple[str, ...]:
    """How a run ended, in terms that are the same for two runs that ended alike."""
    run, ending = saved.run, ending_of(saved.run)
    if ending.how is How.DIED:
        return "died", str(run.exit.code), str(run.exit.timed_out)
    if ending.raised is not None:
        return "raised", ending.raised.type, str(ending.raised.step)
    return "completed", str(run.exit.code) if run.foreign else "0"


def settings_of(saved: SavedRun) -> dict[str, Any]:
    """What the worker was asked to do, as far as it can change the run."""
    scenario = saved.request.get("scenario")
    values = scenario if isinstance(scenario, Mapping) else {}
    return {str(name): value for name, value in values.items() if name not in _ABOUT}


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Setting, ...]:
    """The entries of two nested mappings that are not the same, under dotted names, in the order of ``a``."""
    ours, theirs = dict(_flat("", a)), dict(_flat("", b))
    return tuple(
        Setting(name=name, a=ours.get(name), b=theirs.get(name))
        for name in ours | theirs
        if ours.get(name) != theirs.get(name)
    )


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from _flat(f"{prefix}.{index}", item)
    elif isinstance(value, (list, tuple)):
        yield prefix, ", ".join(map(str, value))
    elif value is not None:
        yield prefix, str(value)
