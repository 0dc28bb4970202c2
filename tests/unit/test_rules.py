"""What is known of each finding: ids, aliases and remedies exist, and a rule that lies in the package is found."""

from dataclasses import replace
from pathlib import Path

import pytest
from nonfinite_examples import overflow
from scenario_files import HEALTHY, written

from dtypedoctor.diagnosis import canonical, diagnose, finding_ids, in_order, page, rules, spec_of, typed_ids
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.lab.cli.scenario_files import load_checked
from dtypedoctor.lab.scenarios.model import Expectation
from dtypedoctor.lab.trials.judge import is_met

ALIASES = {
    "scatter-dtype-mismatch": "merge-dtype-mismatch",
    "masked-overflow": "silent-rescue",
    "train-inference-mismatch": "logprob-gap",
}
SPECS = [spec_of(finding) for finding in finding_ids()]


def test_a_rule_without_a_priority_comes_behind_those_with_one() -> None:
    """So a new rule needs none unless its place matters."""
    spec = FindingSpec(id="new-failure", title="It is new", family=SILENT)
    added = [Rule(name=name, specs=(spec,), detect=lambda trace: ()) for name in ("zeta", "alpha")]
    placed = [rule for rule in rules() if rule.priority < added[0].priority]
    ordered = [rule.name for rule in in_order([*added, *reversed(placed)])]
    assert ordered == [*(rule.name for rule in placed), "alpha", "zeta"]
    assert ordered[:2] == ["collectives", "mismatch"]


def test_every_finding_is_specified_once() -> None:
    """Two rules may find the same failure; they share its spec."""
    found = {spec.id: spec for rule in rules() for spec in rule.specs}
    assert all(spec is found[spec.id] for rule in rules() for spec in rule.specs)
    assert len(typed_ids()) == len(SPECS) + sum(len(spec.aliases) for spec in SPECS)


def test_remedies_that_a_spec_names_exist() -> None:
    """A misspelt one would be left out without a word."""
    named = [name for spec in SPECS for name in (*spec.proposed, *spec.settled_by, *spec.supported_by)]
    assert named
    assert set(named) <= set(remedies())


def test_the_remedy_for_one_class_of_module_comes_before_those_for_any() -> None:
    """It changes less."""
    spec = spec_of("float16-overflow")
    assert spec.remedies_for("Gemma4TextMLP") == ("gemma4-mlp-float32-product", "bfloat16")
    assert spec.remedies_for("LlamaMLP") == ("bfloat16",)


def test_what_cannot_be_switched_on_from_outside_is_not_proposed() -> None:
    """A row in which everything is masked needs another mask, and a domain error another formula."""
    assert [spec_of(name).proposed for name in ("fully-masked-row", "domain-error", "nonfinite-input")] == [(), (), ()]


@pytest.mark.parametrize(("alias", "finding"), ALIASES.items())
def test_an_alias_is_taken_wherever_an_id_is_typed(alias: str, finding: str, tmp_path: Path) -> None:
    """By `explain`, and in what a scenario expects; reports keep the id."""
    assert (canonical(alias), spec_of(alias).id) == (finding, finding)
    assert page(alias) == page(finding)
    path = written(tmp_path, HEALTHY + f"expect: {{findings: [{alias}]}}\n")
    assert load_checked(path, allow_code=False).expect.findings == [alias]
    found = (replace(diagnose(overflow().build())[0], id=finding),)
    assert is_met(Expectation(findings=[alias]), found, ())[0]
    assert not is_met(Expectation(findings=["float16-overflow"]), found, ())[0]


def test_an_id_that_no_rule_knows_has_an_empty_spec() -> None:
    """Reports of other versions, and of packages that are not installed here, are still read."""
    spec = spec_of("of-another-version")
    assert (spec.id, spec.remedies_for(), spec.references, spec.needs) == ("of-another-version", (), (), None)
