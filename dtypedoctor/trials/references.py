"""The runs that others are compared with, as scenarios derived from the one under treatment."""

from typing import Any

from dtypedoctor.scenario.model import Scenario, Script

_ONE_PASS = {"kind": "forward", "steps": 1, "batch_size": 1, "sequence_length": 2}


def healthy_reference(scenario: Scenario) -> Scenario | None:
    """The scenario with the changes under its ``reference``; None where it has none.

    Every model gets the reference's dtype, quantisation states included; autocast regions go unless they are kept,
    compilation stays unless it is taken away.
    """
    if scenario.reference is None:
        return None
    steps = scenario.model_dump()["steps"]
    for step in steps:
        if step["model"] is not None:
            step["model"]["dtype"] = scenario.reference.dtype
            if step["model"]["quantization"] is not None:
                step["model"]["quantization"] |= {"quant_state_dtype": None, "compute_dtype": None}
        if not scenario.reference.autocast:
            step["autocast"] = None
        if not scenario.reference.compile:
            step["compile"] = None
    return scenario.with_changes(steps=steps)


def float32_twin(scenario: Scenario) -> Scenario | None:
    """A run whose models compute in float32 with the weights of the scenario's; only their first outputs are wanted.

    None for scenarios that run a script, which builds its models itself.
    """
    if is_script(scenario):
        return None
    steps = [_in_float32(step) for step in scenario.model_dump()["steps"] if _builds_or_unloads(step)]
    return scenario.with_changes(steps=steps, corrections=[], conditions=[])


def is_script(scenario: Scenario) -> bool:
    """Whether the scenario runs a user's script, which builds its models itself."""
    return any(isinstance(step.workload, Script) for step in scenario.steps)


def _builds_or_unloads(step: dict[str, Any]) -> bool:
    return step["model"] is not None or step["workload"]["kind"] == "unload"


def _in_float32(step: dict[str, Any]) -> dict[str, Any]:
    plain = {"name": step["name"], "workload": step["workload"]}
    if step["model"] is None:
        return plain
    return plain | {"model": step["model"] | {"float32_twin": True}, "workload": _ONE_PASS}
