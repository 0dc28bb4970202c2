"""Which corrections there are to choose from."""

from collections.abc import Iterator, Sequence

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trials.changes import with_corrections
from dtypedoctor.trials.remedies import remedies

__all__ = ["offered_corrections", "with_offers"]


def offered_corrections(scenario: Scenario, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Corrections that the findings propose and that the scenario names, in this order, each once.

    Remedies that change something else (a dtype, an autocast region) are no corrections and left out, and so are those that
    are there to raise.
    """
    return tuple(dict.fromkeys(_corrections(scenario, findings)))


def with_offers(scenario: Scenario, corrections: Sequence[str]) -> Scenario:
    """The scenario with these corrections switched on."""
    return with_corrections(*corrections)(scenario)


def _corrections(scenario: Scenario, findings: Sequence[Finding]) -> Iterator[str]:
    names = [r for f in findings if f.severity is not Severity.INFO for r in f.remedies]
    names += [*scenario.remedies, *scenario.expect.cured_by, *scenario.expect.not_cured_by]
    present = {correction.id for correction in scenario.corrections}
    for name in dict.fromkeys(names):
        remedy = remedies().get(name)
        if remedy is None or remedy.strict:
            continue
        changed = remedy.change(scenario)
        if changed.with_changes(corrections=scenario.model_dump()["corrections"]) == scenario:
            yield from (correction.id for correction in changed.corrections if correction.id not in present)
