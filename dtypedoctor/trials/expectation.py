"""Whether a scenario showed what it says it shows."""

from collections.abc import Iterator, Sequence

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.registry import canonical
from dtypedoctor.scenario.model import Expectation
from dtypedoctor.trials.results import Outcome, Trial

__all__ = ["expectation_on", "is_met"]


def expectation_on(expect: Expectation, device: str) -> Expectation:
    """What is expected on ``device`` (``cpu``, ``cuda:0``): nothing, if the expectation is for another one."""
    elsewhere = expect.only_on is not None and not device.startswith(expect.only_on)
    return Expectation() if elsewhere else expect


def is_met(expect: Expectation, findings: Sequence[Finding], trials: Sequence[Trial]) -> tuple[bool, str]:
    """Whether everything came true, and a sentence that says so. The findings expected are the first ones, in order."""
    wrong = [*_about_findings(expect, findings), *_about_trials(expect, trials)]
    if wrong:
        return False, "Not as the scenario says: " + "; ".join(wrong) + "."
    if not expect.findings:
        return True, "As the scenario says: healthy."
    if len(expect.cured_by) < 2:
        return True, f"As the scenario says: it fails, and {next(iter(expect.cured_by), 'nothing')} cures it."
    return True, f"As the scenario says: it fails, and each of these cures it: {', '.join(expect.cured_by)}."


def _about_findings(expect: Expectation, findings: Sequence[Finding]) -> Iterator[str]:
    found = [f.id for f in findings if f.severity is not Severity.INFO]
    expected = [canonical(name) for name in expect.findings]
    if found[: len(expected)] != expected or (found and not expected):
        wanted = f"findings {', '.join(expect.findings)}" if expect.findings else "no findings"
        yield f"expected {wanted}, got {', '.join(found) or 'none'}"


def _about_trials(expect: Expectation, trials: Sequence[Trial]) -> Iterator[str]:
    outcomes = {trial.remedy: trial.outcome for trial in trials}
    wanted = dict.fromkeys(expect.cured_by, Outcome.FIXED) | dict.fromkeys(expect.not_cured_by, Outcome.NOT_FIXED)
    for name, outcome in wanted.items():
        if outcomes.get(name) is not outcome:
            yield f"{name} should be {outcome.value}, is {outcomes[name].value if name in outcomes else 'unknown'}"
