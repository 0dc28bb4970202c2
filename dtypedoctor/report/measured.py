"""How much of a run was measured, and whether all of that was finite: the facts that a verdict may be built of."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.incidents import GRADIENTS
from dtypedoctor.diagnosis.ops import asked_for
from dtypedoctor.report.text import counted, one_line
from dtypedoctor.trace.events import (
    Coverage,
    Op,
)
from dtypedoctor.trace.model import Trace

ENOUGH = 0.9
"""Share of what ran that has to be measured before a run may be called healthy. Operators are sampled, so any number is enough."""

_NAMES = {
    "module_calls": "module call",
    "operators": "operator outside of modules",
    "gradients": "parameter gradient",
    "losses": "loss",
}
_PLURALS = {"operators": "operators outside of modules", "losses": "losses"}
_COUNTED_AS = {"output": "module_calls", "grad": "gradients", "loss": "losses"}
"""What stands for the counts in a trace without them: it is older, or the process left without ending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of a run.

    Attributes:
        counts: for each kind of thing how many were measured, and how many ran.
        bad: the first value that is not finite, in words, whether it matters or not; empty where everything measured is finite.
        matters: the first one that reaches a loss, gradient, parameter or result, and that no op trace shows to be meant so, in
            words; empty where there is none.
    """

    counts: Mapping[str, tuple[int, int]]
    bad: str = ""
    matters: str = ""

    @property
    def nothing(self) -> bool:
        """Whether nothing at all was measured."""
        return not any(measured for measured, _ in self.counts.values())

    @property
    def ran(self) -> bool:
        """Whether anything ran that could have been measured."""
        return any(total for _, total in self.counts.values())

    def missing(self) -> Iterator[str]:
        """For each kind of which a relevant share was not measured, how much was, e.g. ``0 of 214 module calls``."""
        for name, (measured, total) in self.counts.items():
            if measured < (total * ENOUGH if name != "operators" else min(total, 1)):
                yield _share(name, measured, total)

    def describe(self) -> str:
        """How much was measured, as a list; empty where nothing ran."""
        return ", ".join(_share(name, *counts) for name, counts in self.counts.items() if counts[1])


def _share(name: str, measured: int, total: int) -> str:
    several = _PLURALS.get(name, "")
    return f"{measured:,} of {counted(total, _NAMES[name], several)}"


def measured_in(traces: Sequence[Trace], diagnosed: Trace | None = None) -> Measured:
    """What was measured of a run.

    Args:
        traces: those of its processes.
        diagnosed: the trace of a second run of one of them that its findings come from, where there is one.
    """
    total: Counter[str] = Counter()
    for trace in traces:
        total.update(_counts(trace))
    seen = [*traces, *([diagnosed] if diagnosed is not None and diagnosed not in traces else [])]
    judged = [diagnosed] if diagnosed is not None and len(traces) == 1 else seen
    return Measured(
        counts={name: (total[f"{name}_measured"], total[name]) for name in _NAMES},
        bad=next(filter(None, map(_first_bad, seen)), ""),
        matters=next(filter(None, map(_first_that_matters, judged)), ""),
    )


def _counts(trace: Trace) -> dict[str, int]:
    record = trace.last(Coverage)
    if record is not None:
        return {field.name: getattr(record, field.name) for field in fields(record)}
    found = Counter(_COUNTED_AS.get(trace.sites[sample.site].kind, "") for sample in trace.samples)
    for number, folded in (trace.folded.sites if trace.folded is not None else {}).items():
        found[_COUNTED_AS.get(trace.sites[number].kind if number in trace.sites else "", "")] += folded.count
    return {key: found[name] for name in _NAMES for key in (name, f"{name}_measured")}


def _first_bad(trace: Trace) -> str:
    """The first value that is not finite and was not asked for by name; a gradient that a loss scaler has made so is one too."""
    analysis = analysis_of(trace)
    if analysis.first_bad is not None:
        sample, site = analysis.first_bad
        what = {"loss": "the loss", "param": "parameter "}.get(
            site.kind, "the gradient of " if site.kind in GRADIENTS else ""
        )
        name = "" if site.kind == "loss" else one_line(site.fqn or site.cls, 80)
        return f"{what}{name} in {trace.moment(sample.step)}"
    for metric in analysis.nonfinite_metrics:
        return f"{metric.nonfinite[0]} in step {metric.step}"
    for op in trace.all(Op):
        if (
            op.sentinel
            and all(t.finite for t in op.inputs)
            and not all(t.finite for t in op.outputs)
            and not asked_for(op)
        ):
            return f"{op.op} at {one_line(op.source or 'an unknown line', 80)}"
    folded = trace.folded
    steps = (
        [t.first_nonfinite for t in (*folded.sites.values(), *folded.metrics.values())] if folded is not None else []
    )
    return next((f"a value of step {step}" for step in sorted(s for s in steps if s is not None)), "")


def _first_that_matters(trace: Trace) -> str:
    incident = analysis_of(trace).unexplained
    if incident is not None:
        name = one_line(incident.site.fqn or incident.site.cls, 80) if incident.site is not None else "a value"
        return f"{name} in {trace.moment(incident.step)} ({incident.phase})"
    lost = next((metric for metric in analysis_of(trace).nonfinite_metrics if "loss" in metric.nonfinite), None)
    return f"the loss in step {lost.step}" if lost is not None else ""
