"""Each detector fires where it should and is silent on what looks like it."""

import pytest
from detector_examples import DETECTOR_EXAMPLES, Example

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.registry import finding_ids, rules
from dtypedoctor.diagnosis.rule import Confidence

RULES = {rule.name: rule for rule in rules() if rule.detect}
EXAMPLES = [
    pytest.param(detector, finding, example, id=f"{detector}: {finding}")
    for detector, findings in DETECTOR_EXAMPLES.items()
    for finding, example in findings.items()
]


def test_every_detector_and_every_finding_has_an_example() -> None:
    """A detector without one could fire on anything."""
    assert set(DETECTOR_EXAMPLES) == set(RULES)
    assert {finding for findings in DETECTOR_EXAMPLES.values() for finding in findings} == set(finding_ids())


@pytest.mark.parametrize(("detector", "finding", "example"), EXAMPLES)
def test_a_finding_comes_from_its_detector_and_first_of_all(detector: str, finding: str, example: Example) -> None:
    """No other detector explains the same trace better."""
    trace = example.fires()
    assert finding in {found.id for found in RULES[detector].detect(trace)}
    assert diagnose(trace)[0].id == finding


@pytest.mark.parametrize(("detector", "finding", "example"), EXAMPLES)
def test_no_detector_makes_the_finding_in_the_silent_example(detector: str, finding: str, example: Example) -> None:
    """It differs from the other in one thing that matters."""
    assert finding not in {found.id for found in diagnose(example.silent())}


@pytest.mark.parametrize(("detector", "finding", "example"), EXAMPLES)
def test_a_finding_says_what_happened_why_and_on_what_grounds(detector: str, finding: str, example: Example) -> None:
    """One sentence as headline, a cause, measurements, a phase, and public references."""
    found = next(one for one in RULES[detector].detect(example.fires()) if one.id == finding)
    assert found.summary.endswith(".")
    assert found.cause.endswith(".")
    assert found.evidence
    assert found.phase
    assert found.references
    assert all(reference.startswith("https://") for reference in found.references)


@pytest.mark.parametrize(("detector", "finding", "example"), EXAMPLES)
def test_a_proven_finding_names_its_counterfactual_and_no_other_does(
    detector: str, finding: str, example: Example
) -> None:
    """``proven_by`` is a clause that a sentence can end with."""
    for found in RULES[detector].detect(example.fires()):
        assert (found.confidence is Confidence.PROVEN) == bool(found.proven_by)
        assert not (found.proven_by or "").endswith(".")


@pytest.mark.parametrize(("detector", "finding", "example"), EXAMPLES)
def test_a_rule_has_the_spec_of_each_finding_that_it_makes(detector: str, finding: str, example: Example) -> None:
    """Remedies and references come from there."""
    specs = {spec.id for spec in RULES[detector].specs}
    assert {found.id for found in RULES[detector].detect(example.fires())} <= specs
