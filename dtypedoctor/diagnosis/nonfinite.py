"""The non-finite family: looks for the origin of the first inf or NaN that matters, and says what it is."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.attention import judge_attention_scores, judge_masked_row
from dtypedoctor.diagnosis.backward import judge_backward
from dtypedoctor.diagnosis.by_module import judge_by_module
from dtypedoctor.diagnosis.compile_only import judge_compiled
from dtypedoctor.diagnosis.constants import judge_constant
from dtypedoctor.diagnosis.divergence import judge_divergence
from dtypedoctor.diagnosis.domain import judge_domain
from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.givens import judge_given
from dtypedoctor.diagnosis.nonfinite_origin import Origin, that_matter
from dtypedoctor.diagnosis.norm_square import judge_norm_square
from dtypedoctor.diagnosis.ops import graph_of
from dtypedoctor.diagnosis.optimizer_step import judge_optimizer_step
from dtypedoctor.diagnosis.overflow import judge_overflow
from dtypedoctor.diagnosis.rounded import judge_rounded
from dtypedoctor.diagnosis.silent.absorbed import swallowed_overflows
from dtypedoctor.diagnosis.unexamined import judge_unexamined
from dtypedoctor.trace.reader import Trace

JUDGES: tuple[Callable[[Origin], Finding | None], ...] = (
    judge_given,
    judge_masked_row,
    judge_optimizer_step,
    judge_norm_square,
    judge_attention_scores,
    judge_backward,
    judge_overflow,
    judge_unexamined,
    judge_rounded,
    judge_domain,
)
"""What an origin may be, the most specific first; the last one always has an answer."""


def detect_nonfinite(trace: Trace) -> Iterator[Finding]:
    """The origin of the first inf or NaN that gets anywhere, overflows that were swallowed on the way, and one that was refused."""
    refused = judge_constant(trace)
    found = tuple(_first_that_matters(trace)) if refused is None else (refused,)
    diverged = next((cause for finding in found if (cause := judge_divergence(trace, finding)) is not None), None)
    if diverged is not None:
        yield diverged
        found = tuple(replace(finding, remedies=(), consequence_of=diverged.id) for finding in found)
    yield from found
    places = {(finding.op, finding.source) for finding in found}
    yield from (f for f in swallowed_overflows(trace) if (f.op, f.source) not in places)


def _first_that_matters(trace: Trace) -> Iterator[Finding]:
    """The verdict on the first incident that matters; all later ones follow from it."""
    for incident, found in that_matter(graph_of(trace)):
        compiled = judge_compiled(trace, incident)
        if compiled is not None:
            yield compiled
        elif found.origin is None:
            yield judge_by_module(trace, incident)
        else:
            yield next(finding for judge in JUDGES if (finding := judge(found.origin)) is not None)
        return
