"""What ``dtypedoctor parity`` says of rollouts whose truth is known."""

import json
from pathlib import Path

import pytest
from rollout_corpus import CASES, Case

from dtypedoctor.lab.parity.rescoring import Scorer, split
from dtypedoctor.lab.parity.rollouts import Parity, Sampling, read_rollouts


def measured(case: Case, tmp_path: Path) -> Parity:
    drawn, [policy, *others] = case.make(tmp_path)
    file = tmp_path / "rollouts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in drawn))
    rollouts = read_rollouts(file, Sampling())
    scorer = Scorer(rollouts, str(file), "cpu", 8)
    return split(str(policy), scorer, others=list(map(str, others)), dtype=None, of_rows=len(rollouts))


@pytest.mark.release(all_but=16)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_gap_is_explained_by_what_made_it(case: Case, tmp_path: Path) -> None:
    result = measured(case, tmp_path)
    explained = {change.kind for change in result.causes} if result.verdict == "gap" else set()
    assert (result.verdict, explained) == (case.verdict, set(case.kinds)), result


def test_the_corpus_has_as_many_cases_as_the_page_says() -> None:
    gaps = sum(case.verdict == "gap" for case in CASES)
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    assert f"{gaps} seeded gaps" in page
    assert f"{len(CASES) - gaps} healthy generators" in page
