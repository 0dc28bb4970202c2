"""The command line changes a scenario without touching its file."""

import pytest

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.loading import load_scenario, override, resolve
from dtypedoctor.lab.scenarios.model import Scenario


@pytest.fixture
def scenario() -> Scenario:
    """A shipped scenario with outliers and adapters."""
    return load_scenario(resolve("gemma4_grpo_fp16"))


def test_another_model_is_taken_without_the_outliers_of_the_first(scenario: Scenario) -> None:
    """Real weights have the magnitudes that outliers only imitate; dtype and adapters stay."""
    changed = override(scenario, model="unsloth/gemma-4-E2B-it", device="cuda")
    before, after = scenario.steps[0].model, changed.steps[0].model
    assert before is not None
    assert after is not None
    assert (after.name, after.outliers, after.options) == ("unsloth/gemma-4-E2B-it", [], {})
    assert (after.dtype, after.lora) == (before.dtype, before.lora)
    assert changed.device == "cuda"


def test_a_value_that_no_file_could_hold_is_refused_with_its_option(scenario: Scenario) -> None:
    """The message is the file's, with the option's name as the place."""
    with pytest.raises(UsageError) as refused:
        override(scenario, dtype="fp16")
    assert refused.value.message == (
        "--dtype: Input should be 'float16', 'bfloat16', 'float32' or 'float64', got 'fp16'; did you mean 'float16'?"
    )
    with pytest.raises(UsageError) as refused:
        override(scenario, seed=-1)
    assert refused.value.message == "--seed: Input should be greater than or equal to 0, got -1"
