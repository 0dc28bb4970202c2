"""Real trainings that are ended at random points: what the report says is held against what the training itself wrote down."""

from pathlib import Path

import pytest
from faults import Ended, Plan, end, mistakes, plans, ways
from nursery import preload

SOME, MANY = 11, 231
"""Kills in the ordinary suite and in the long one: the same number for each way."""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    preload(frozenset({"torch", "transformers"}))


def wrong(folder: Path, number: int, seed: int) -> dict[str, list[str]]:
    """The mistakes of each training that is not reported as it was."""
    found = {}
    for index, plan in enumerate(plans(number, seed)):
        if plan.kind in ways():
            found[f"{index}: {plan}"] = list(mistakes(end(plan, folder / str(index))))
    return {name: lines for name, lines in found.items() if lines}


def test_a_training_that_is_ended_anyhow_loses_at_most_the_module_that_was_executed(tmp_path: Path) -> None:
    """Each way of ending: the module entered last, its dtypes, the first inf, and what is missing are named."""
    assert wrong(tmp_path, SOME, seed=11) == {}


@pytest.mark.release
@pytest.mark.timeout(3000)
def test_hundreds_of_trainings_that_are_ended_anyhow_lose_at_most_the_module_that_was_executed(tmp_path: Path) -> None:
    """More than 200 ends, all ways alike; ``python tests/e2e/fault_table.py`` prints the table of docs/measurements/reliability.md."""
    assert wrong(tmp_path, MANY, seed=23) == {}


def killed(folder: Path, **more: int) -> Ended:
    """A training that is killed in its third step, inside a module."""
    return end(Plan(kind="SIGKILL", where="enter", after=70, **more), folder)


def test_a_killed_training_is_reported_as_one(tmp_path: Path) -> None:
    """The headline says how the script ended and where; nothing is called healthy."""
    ended = killed(tmp_path)
    assert ended.report.status == "worker-died"
    assert "SIGKILL" in ended.report.headline
    assert (
        f"the last module entered was {ended.truth.module} (float32 in, float32 out) in step 3" in ended.report.headline
    )


def test_the_first_value_that_was_not_finite_outlives_the_process(tmp_path: Path) -> None:
    """Also where the process ended before the bad value got anywhere, so that nothing can be called its consequence."""
    ended = end(Plan(kind="SIGKILL", where="leave", after=25, overflow_in=1), tmp_path)
    assert ended.truth.times_left["model.layers.1.mlp.down_proj"] == 0
    assert "not finite" not in ended.report.headline
    later = end(Plan(kind="SIGKILL", where="leave", after=26, overflow_in=1), tmp_path / "later")
    assert later.truth.times_left["model.layers.1.mlp.down_proj"] == 1
    assert "model.layers.1.mlp.down_proj (float32) in step 1" in " ".join(
        (later.report.headline, *later.report.coverage)
    )
