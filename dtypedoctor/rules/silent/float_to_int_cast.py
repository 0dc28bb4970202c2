"""``float-to-int-cast``: activations that go through an integer dtype."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.statement import Statement, make_finding_of
from dtypedoctor.diagnosis.wording import listed, named_module, short
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import FloatToInt

SPEC = FindingSpec(
    id="float-to-int-cast",
    title="Activations were cast to an integer dtype",
    family=SILENT,
    references=("https://github.com/unslothai/unsloth-zoo/pull/482",),
)


def detect_integer_casts(trace: Trace) -> Iterator[Finding]:
    """Activations that went through an integer dtype and came back as numbers; a line of code tells once of all its modules."""
    by_line: dict[tuple[str | None, ...], list[Observed[FloatToInt]]] = {}
    for one in trace.observed(FloatToInt):
        by_line.setdefault((one.what.op, one.what.source, one.what.to), []).append(one)
    for seen, *others in by_line.values():
        what = seen.what
        statement = Statement(
            id="float-to-int-cast",
            proven_by=f"the activation before the cast differs from what is used by {what.relative_error:.3g} times its norm",
            summary=f"{short(seen.fqn)} casts an activation from {what.from_} to {what.to} in step {seen.step}.",
            cause=(
                f"A cast to {what.to} cuts fractions off, and what lies outside of its range has no defined result. The "
                f"integers are used as numbers again by {what.used_by} at {what.used_at}, so every dtype after that "
                "looks right. A common reason is `x.to(layer.weight.dtype)` with a packed weight."
            ),
            evidence=(
                (
                    f"The {what.elements} integers differ from the activation by {what.relative_error:.3g} times its "
                    "Euclidean norm."
                ),
                "They are never used to look something up.",
                *((f"The same line does so in {listed([named_module(o.fqn) for o in others])}.",) if others else ()),
            ),
        )
        yield make_finding_of(seen, statement, dtype=what.to, op=what.op, source=what.source)


RULES = (Rule(name="integer-casts", specs=(SPEC,), detect=detect_integer_casts),)
