"""``global-state-changed``: a library has set how precisely everything computes, while the program was running."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.rule import SILENT, Confidence, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import listed
from dtypedoctor.rules import Statement, make_finding_of
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import GlobalState

SPEC = FindingSpec(
    id="global-state-changed",
    title="A library changed torch's global precision while the program was running",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/pytorch/ao/pull/4643",),
    do_this="Set it back after the call: read it before (`torch.get_float32_matmul_precision()`, `torch.get_default_dtype()`), and set that again.",
)

OF_OTHER_KERNELS = 1e-5
"""Difference of a float32 product, of its largest magnitude, that another kernel makes in the same precision."""


def detect(trace: Trace) -> Iterator[Finding]:
    """Settings that stay changed after the first call, by the line that has changed them; those of a program's own line are meant."""
    matter = [
        seen
        for seen in _lasting(trace)
        if seen.what.by_library and (seen.what.setting == "default dtype" or seen.what.error > OF_OTHER_KERNELS)
    ]
    for source in dict.fromkeys(seen.what.source for seen in matter):
        yield _finding([seen for seen in matter if seen.what.source == source])


def _lasting(trace: Trace) -> Iterator[Observed[GlobalState]]:
    """The last change of each setting that is not again what it was before the first change in the run."""
    told = trace.observed(GlobalState)
    for name in dict.fromkeys(seen.what.setting for seen in told if seen.what.has_run):
        changes = [seen for seen in told if seen.what.setting == name and seen.what.has_run]
        if changes[-1].what.after != changes[0].what.before:
            yield changes[-1]


def _finding(seen: list[Observed[GlobalState]]) -> Finding:
    first, what = seen[0], seen[0].what
    changes = [f"{each.what.setting} from {each.what.before} to {each.what.after}" for each in seen]
    of_tensors = any(each.what.setting == "default dtype" for each in seen)
    effect = (
        "New tensors without a dtype of their own get another one."
        if of_tensors
        else f"A float32 product on this device moves by {what.error:.2g} of its largest magnitude."
    )
    statement = Statement(
        id=SPEC.id,
        severity=SPEC.severity,
        confidence=Confidence.LIKELY,
        proven_by=None if of_tensors else f"the same float32 product under both settings differs by {what.error:.2g}",
        summary=f"{what.source} has set {listed(changes)} for the whole process before step {first.step}, and it stays.",
        cause=f"{effect} Steps before and after it are not computed alike, and no line of the program's own asks for that.",
        evidence=(
            f"Read at the first call after it, called at {what.called_at}; at the call before it was still {what.before}.",
        ),
    )
    return make_finding_of(first, statement, dtype=None, source=what.called_at)


RULES = (Rule(name="global-state-changed", priority=185, specs=(SPEC,), detect=detect),)
