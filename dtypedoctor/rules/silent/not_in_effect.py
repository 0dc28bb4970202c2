"""``patch-not-applied`` and ``stale-autocast-cache``: a correction that nothing calls, a new weight that autocast does not use."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import listed, named_module, short
from dtypedoctor.rules import Statement, make_finding, make_finding_of
from dtypedoctor.trace.events import Correction
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import StaleCopy, Unpatched

PATCH_NOT_APPLIED = FindingSpec(
    id="patch-not-applied",
    title="A requested correction is not in effect",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/unslothai/unsloth-zoo/pull/600",),
)


def detect_missing_patches(trace: Trace) -> Iterator[Finding]:
    """Corrections that were asked for and do not run, and methods that a patch was to replace and did not."""
    for seen in trace.observed(Unpatched):
        what = seen.what
        patched = f"{what.class_}.{what.method}"
        summary = f"A patch of {patched} was prepared but is not in effect."
        if what.refused_by:
            evidence = f"{what.refused_by} was asked to patch {patched} and returned False; {what.source} still runs."
        else:
            evidence = f"{what.class_}.{what.attribute} keeps the original, and {patched} still runs the same code object, {what.source}."
        if not what.patcher:
            yield _not_applied(fqn=seen.fqn, source=what.source, summary=summary, evidence=(evidence,))
            continue
        summary = f"{what.patcher} was to replace {patched} but did not{_other_parameters(what)}."
        prepared = f"The replacement is defined at {what.replacement}; {what.patcher} prepared it."
        yield _not_applied(fqn=seen.fqn, source=what.replacement, summary=summary, evidence=(evidence, prepared))
    last = {record.id: record for record in trace.all(Correction)}
    for record in last.values():
        if not record.installed:
            yield _not_applied(
                fqn=None,
                source=None,
                summary=f"The requested correction {record.id} is not in effect: {record.reason}",
                evidence=(f"Installing it failed: {record.reason}",),
            )
        elif record in trace.uncalled_corrections:
            yield _not_applied(
                fqn=None,
                source=None,
                summary=f"The correction {record.id} is installed in {record.target}, and nothing has called it.",
                evidence=(f"It was called 0 times by the end of the run ({record.proof}).",),
            )


def _other_parameters(what: Unpatched) -> str:
    """How the replacement's parameters differ from the method's, as the end of a sentence; empty where their names are the same."""
    differences = []
    if what.surplus:
        differences.append(f"its replacement takes {what.surplus}, the method does not")
    if what.missing:
        differences.append(f"the method takes {what.missing}, its replacement does not")
    return f": {'; '.join(differences)}" if differences else ""


def _not_applied(*, fqn: str | None, source: str | None, summary: str, evidence: tuple[str, ...]) -> Finding:
    statement = Statement(
        id="patch-not-applied",
        severity=Severity.WARNING,
        proven_by="the code object that runs is not the patch, or nothing called it",
        summary=summary,
        cause=(
            "A patcher may silently skip a method whose source changed; only the code object that runs shows it. "
            f"What the patch was meant to fix in {short(fqn)} is not fixed."
        ),
        evidence=evidence,
    )
    return make_finding(statement, phase="static", fqn=fqn, source=source)


STALE_AUTOCAST_CACHE = FindingSpec(
    id="stale-autocast-cache",
    title="Autocast serves an old half-precision copy of a weight that has changed",
    family=SILENT,
    references=("https://github.com/X-GenGroup/Flow-Factory/issues/186", "https://github.com/NVIDIA/apex/issues/132"),
    ablations=("autocast-off", *OF_ANY_FINDING),
    needs="autocast-off",
    do_this="Enter the autocast region in each step, around the forward pass only, or give it `cache_enabled=False`.",
    edits=("region-without-cache",),
)


def detect_stale_cache(trace: Trace) -> Iterator[Finding]:
    """A layer that autocast gives an old half-precision copy of its weight."""
    seen = trace.observed(StaleCopy)
    if not seen:
        return
    first = seen[0]
    what = first.what
    statement = Statement(
        id="stale-autocast-cache",
        proven_by=f"the same layer run again without autocast's cache differs by {what.relative_error:.2g} of its largest magnitude",
        summary=(
            f"{short(first.fqn)} computes with an old {what.dtype} copy of its weight in step {first.step}: the weight "
            "has changed inside one autocast region."
        ),
        cause=(
            "Autocast keeps the half-precision copy of a float32 weight until the outermost region ends, and does not look "
            f"whether the weight has changed since. The region at {what.region} is open across the change."
        ),
        evidence=(
            (
                f"{what.weight} differs from what it was at the first call in the region; run again without the cache, the "
                f"layer's result differs by {what.relative_error:.2g} of its largest magnitude."
            ),
            f"Layers seen so: {listed([named_module(o.fqn) for o in seen])}.",
        ),
    )
    yield make_finding_of(first, statement, dtype=what.dtype, source=what.region)


RULES = (
    Rule(name="missing-patches", priority=90, specs=(PATCH_NOT_APPLIED,), detect=detect_missing_patches),
    Rule(name="stale-autocast-cache", priority=100, specs=(STALE_AUTOCAST_CACHE,), detect=detect_stale_cache),
)
