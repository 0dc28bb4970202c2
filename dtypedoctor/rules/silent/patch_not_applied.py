"""``patch-not-applied``: a correction that nothing calls."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.statement import Statement, make_finding
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.trace.events import Correction
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import Unpatched

SPEC = FindingSpec(
    id="patch-not-applied",
    title="A correction was asked for and is not in place",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/unslothai/unsloth-zoo/pull/600",),
)


def detect_missing_patches(trace: Trace) -> Iterator[Finding]:
    """Corrections that were asked for and do not run, and originals kept for a patch that was not made."""
    for seen in trace.observed(Unpatched):
        what = seen.what
        yield _not_applied(
            fqn=seen.fqn,
            source=what.source,
            summary=f"A patch of {what.class_}.{what.method} was prepared and is not in place.",
            evidence=(
                (
                    f"{what.class_}.{what.attribute} keeps the original, and {what.class_}.{what.method} still "
                    f"runs the same code object, {what.source}."
                ),
            ),
        )
    last = {record.id: record for record in trace.all(Correction)}
    for record in last.values():
        if not record.installed:
            yield _not_applied(
                fqn=None,
                source=None,
                summary=f"The correction {record.id} was asked for and is not in place: {record.reason}",
                evidence=(f"Installing it failed: {record.reason}",),
            )
        elif record in trace.uncalled_corrections:
            yield _not_applied(
                fqn=None,
                source=None,
                summary=f"The correction {record.id} is installed in {record.target}, and nothing has called it.",
                evidence=(f"It was called 0 times by the end of the run ({record.proof}).",),
            )


def _not_applied(*, fqn: str | None, source: str | None, summary: str, evidence: tuple[str, ...]) -> Finding:
    statement = Statement(
        id="patch-not-applied",
        severity=Severity.WARNING,
        proven_by="the code that runs was looked at: it is not the patch, or nothing has called it",
        summary=summary,
        cause=(
            "A patcher may silently skip a method whose source changed; only the code object that runs shows it. "
            f"What the patch was meant to fix in {short(fqn)} is not fixed."
        ),
        evidence=evidence,
    )
    return make_finding(statement, phase="static", fqn=fqn, source=source)


RULES = (Rule(name="missing-patches", specs=(SPEC,), detect=detect_missing_patches),)
