"""The verdict table has a row for each mode that is another run of the same model."""

from typing import Any

import pytest

from dtypedoctor.lab.bisect.probes import Layers, Mode, cheaper, modes, reference
from dtypedoctor.lab.scenarios.loading import case_of
from dtypedoctor.lab.scenarios.model import Scenario

CULPRIT = "model.layers.0.mlp::self"


def rows(scenario: Scenario, phase: str = "generate", step: int = 2) -> dict[str, Mode]:
    ladder = cheaper(scenario, phase, step)
    return {mode.name: mode for mode in modes(ladder[0], ladder, [CULPRIT])}


def first(mode: Mode) -> dict[str, Any]:
    (step,) = mode.scenario.model_dump()["steps"]
    return step


@pytest.fixture
def grpo() -> dict[str, Mode]:
    """Of the Gemma-4 that dies in its second generation."""
    return rows(case_of("builtin:gemma4-tiny", "float16"))


def test_each_bisect_mode_changes_what_it_says(grpo: dict[str, Mode]) -> None:
    """dtype, attention, autocast, compiler, checkpointing, loss scale."""
    assert first(grpo["model in bfloat16"])["model"]["dtype"] == "bfloat16"
    assert first(grpo["eager attention"])["model"]["attention"] == "eager"
    assert first(grpo["sdpa attention"])["model"]["attention"] == "sdpa"
    assert first(grpo["float16 autocast"])["autocast"]["dtype"] == "float16"
    assert first(grpo["compiled (inductor)"])["compile"]["backend"] == "inductor"
    assert first(grpo["gradient checkpointing"])["model"]["gradient_checkpointing"]
    assert first(grpo["loss scale"])["grad_scaler"]
    assert grpo["float32 throughout"].scenario == reference(grpo["one forward pass"].scenario)


@pytest.mark.parametrize(("layers", "regions", "how"), [(11, "model", ""), (12, "layers", ", layer by layer")])
def test_of_many_layers_each_is_compiled_by_itself(layers: int, regions: str, how: str) -> None:
    """Layers that are alike are compiled once, and the row says so; with a kept module in one of them however few there are."""
    ladder = cheaper(case_of("builtin:gemma4-tiny", "float16"), "generate", 2)
    found = {mode.name: mode for mode in modes(ladder[0], ladder, [CULPRIT], layers=Layers("model.layers", layers))}
    assert first(found[f"compiled (inductor{how})"])["compile"]["regions"] == regions
    kept = found["compiled (aot_eager, layer by layer), culprits in float32"]
    assert first(kept)["compile"]["regions"] == "layers"


def test_what_a_scenario_has_on_is_switched_off_by_a_bisect_mode() -> None:
    """A scenario with autocast, compiler and checkpointing is run without each."""
    scenario = case_of("builtin:llama-tiny", "float32", "forward")
    step = scenario.model_dump()["steps"][0]
    step["autocast"], step["compile"] = {"dtype": "float16"}, {"backend": "inductor"}
    step["workload"]["backward"], step["model"]["gradient_checkpointing"] = True, True
    found = rows(scenario.with_changes(steps=[step]), "forward", 1)
    assert first(found["without autocast"])["autocast"] is None
    assert first(found["not compiled"])["compile"] is None
    assert not first(found["without gradient checkpointing"])["model"]["gradient_checkpointing"]
    assert "float16 autocast" not in found
    assert not any(name.startswith("compiled") for name in found)


def test_no_run_is_made_twice_under_two_names(grpo: dict[str, Mode]) -> None:
    """Every row is another scenario."""
    scenarios = [mode.scenario for mode in grpo.values()]
    assert all(scenario not in scenarios[:index] for index, scenario in enumerate(scenarios))


def test_generation_alone_has_no_backward_rows() -> None:
    """A model that only generates is not asked for gradients."""
    found = rows(case_of("builtin:gemma4-tiny", "float16", "generate"), "generate", 1)
    assert "one forward pass" in found
    assert not any(word in name for name in found for word in ("backward", "checkpointing", "loss scale"))
    assert not any(first(mode)["workload"].get("backward") for mode in found.values())


def test_several_steps_in_one_process_are_only_run_as_they_are() -> None:
    """What a mode would change in them is not one thing."""
    scenario = case_of("builtin:llama-tiny", "float16")
    twice = scenario.with_changes(steps=[*scenario.model_dump()["steps"]] * 2)
    assert [mode.scenario for mode in modes(twice, [twice], [CULPRIT])] == [twice]
