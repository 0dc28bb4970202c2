"""Changes of a scenario, the building blocks of remedies. Each gives an equal scenario where it has nothing to change."""

from collections.abc import Callable
from typing import Any

from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trials.references import is_script

Change = Callable[[Scenario], Scenario]

HALF = ("float16", "bfloat16")


def all_of(*changes: Change) -> Change:
    """One change after the other."""

    def change(scenario: Scenario) -> Scenario:
        for one in changes:
            scenario = one(scenario)
        return scenario

    return change


def with_corrections(*corrections: str) -> Change:
    """Switches on corrections that are not on already."""

    def change(scenario: Scenario) -> Scenario:
        present = scenario.model_dump()["corrections"]
        known = {correction["id"] for correction in present}
        return scenario.with_changes(corrections=present + [{"id": c} for c in corrections if c not in known])

    return change


def with_conditions(*conditions: str) -> Change:
    """Switches conditions of the whole process that are not switched already."""

    def change(scenario: Scenario) -> Scenario:
        added = [name for name in conditions if name not in scenario.conditions]
        return scenario.with_changes(conditions=[*scenario.conditions, *added])

    return change


def from_outside(condition: str, otherwise: Change) -> Change:
    """Switches a condition of the process that runs a script; a scenario without one is changed ``otherwise``."""
    switch = with_conditions(condition)
    return lambda scenario: (switch if is_script(scenario) else otherwise)(scenario)


def with_kernels(*ids: str) -> Change:
    """Switches on corrections of dtypedoctor's own kernels; a script has kernels of its own, so it stays as it is."""
    switch = with_corrections(*ids)
    return lambda scenario: scenario if is_script(scenario) else switch(scenario)


def with_model(**changes: Any) -> Change:
    """Sets fields of every model of the scenario."""

    def edit(step: dict[str, Any]) -> None:
        if step["model"] is not None:
            step["model"] |= changes

    return lambda scenario: _edited(scenario, edit)


def with_options(model: str, **options: Any) -> Change:
    """Sets options of every model of this name; others have no such options."""

    def edit(step: dict[str, Any]) -> None:
        if step["model"] is not None and step["model"]["name"] == model:
            step["model"]["options"] |= options

    return lambda scenario: _edited(scenario, edit)


def with_autocast(dtype: str | None) -> Change:
    """Opens an autocast region of ``dtype`` around every workload that computes, or closes all of them."""

    def edit(step: dict[str, Any]) -> None:
        if step["workload"]["kind"] != "unload":
            step["autocast"] = None if dtype is None else (step["autocast"] or {}) | {"dtype": dtype}

    return lambda scenario: _edited(scenario, edit)


def autocast_of_model(scenario: Scenario) -> Scenario:
    """Gives every autocast region the dtype of the model inside it, where that is a 16-bit one."""
    dtype = None

    def edit(step: dict[str, Any]) -> None:
        nonlocal dtype
        if step["model"] is not None:
            dtype = step["model"]["dtype"]
        if step["autocast"] is not None and dtype in HALF:
            step["autocast"]["dtype"] = dtype

    return _edited(scenario, edit)


def fresh_process(scenario: Scenario) -> Scenario:
    """Leaves only the last model and what is done with it: what came before happened in another process, so to say."""
    steps = scenario.model_dump()["steps"]
    last = max(index for index, step in enumerate(steps) if step["model"] is not None or index == 0)
    return scenario.with_changes(steps=steps[last:])


def _edited(scenario: Scenario, edit: Callable[[dict[str, Any]], None]) -> Scenario:
    steps = scenario.model_dump()["steps"]
    for step in steps:
        edit(step)
    return scenario.with_changes(steps=steps)
