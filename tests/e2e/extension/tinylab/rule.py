"""A rule: the gated product rounds to zero, and the layer outputs zeros without a word. Nothing here imports torch."""

from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.rules import SILENT, Confidence, Finding, FindingSpec, Rule, Severity, Statement, Trace, make_finding

SPEC = FindingSpec(
    id="tinylab-gate-underflow",
    title="The gated product rounds to zero in float16",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/example/tinylab/issues/1",),
    remedies=("tinylab-gate-float32", "bfloat16"),
    settled_by=("tinylab-gate-float32",),
    page=Path(__file__).with_name("gate_underflow.md"),
)


def detect(trace: Trace) -> Iterator[Finding]:
    """The first output of each gated layer that is all zeros."""
    told = set()
    for sample in trace.samples:
        site = trace.sites[sample.site]
        zeros = sample.finite and sample.absmax == 0
        if not zeros or site.cls != "GatedLayer" or site.kind != "output" or site.fqn in told:
            continue
        told.add(site.fqn)
        said = Statement(
            id=SPEC.id,
            severity=SPEC.severity,
            confidence=Confidence.LIKELY,
            summary=f"{site.fqn} outputs only zeros in step {sample.step}.",
            cause=f"Both factors of the gated product are small, and {site.dtype} rounds their product to 0.",
            evidence=("The largest magnitude of the layer's output is 0.",),
        )
        yield make_finding(said, phase=site.phase, step=sample.step, fqn=site.fqn, cls=site.cls, dtype=site.dtype)


RULE = Rule(name="tinylab-gate-underflow", specs=(SPEC,), detect=detect)
