"""Remedies by finding: what is proposed exists, and what is specific comes first."""

from dtypedoctor.diagnosis.ids import FINDING_IDS
from dtypedoctor.diagnosis.prescriptions import BY_FINDING, BY_MODULE, remedies_for
from dtypedoctor.trials.remedies import REMEDIES
from dtypedoctor.trials.settle import COUNTERFACTUALS


def test_every_prescription_is_a_known_remedy_for_a_known_finding() -> None:
    """A misspelt one would be left out without a word."""
    assert set(BY_FINDING) | {finding for finding, _ in BY_MODULE} | set(COUNTERFACTUALS) <= FINDING_IDS
    proposed = [*BY_FINDING.values(), *BY_MODULE.values()]
    assert {remedy for remedies in proposed for remedy in remedies} <= set(REMEDIES)


def test_the_remedy_for_one_class_of_module_comes_before_those_for_any() -> None:
    """It changes less."""
    assert remedies_for("float16-overflow", "Gemma4TextMLP") == ("gemma4-mlp-float32-product", "bfloat16")
    assert remedies_for("float16-overflow", "LlamaMLP") == ("bfloat16",)


def test_what_cannot_be_switched_on_from_outside_is_not_proposed() -> None:
    """A row in which everything is masked needs another mask, and a domain error another formula."""
    assert remedies_for("fully-masked-row") == remedies_for("domain-error") == remedies_for("nonfinite-input") == ()


def test_a_counterfactual_can_be_proposed() -> None:
    """A proof by a trial needs the trial; for compiled graphs it depends on what broke them."""
    by_texts = {"compile-graph-break", "recompile-limit"}
    for finding, remedies in COUNTERFACTUALS.items():
        known = {*BY_FINDING.get(finding, ()), *(r for (f, _), rs in BY_MODULE.items() if f == finding for r in rs)}
        assert finding in by_texts or set(remedies) <= known
