"""How fixes and references change a scenario. A change gives an equal scenario where it has nothing to change."""

from collections.abc import Callable
from typing import Any

from dtypedoctor.lab.scenarios.model import Scenario, Script
from dtypedoctor.plugins import Correction, Remedy, correction_named, registered
from dtypedoctor.replay.capsule import MODEL

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

    None for scenarios that run a script, which builds its models itself, and for capsules, whose inputs belong to their dtype.
    """
    if is_script(scenario) or is_capsule(scenario):
        return None
    steps = [
        _in_float32(step)
        for step in scenario.model_dump()["steps"]
        if step["model"] is not None or step["workload"]["kind"] == "unload"
    ]
    return scenario.with_changes(steps=steps, corrections=[], conditions=[])


def is_script(scenario: Scenario) -> bool:
    """Whether the scenario runs a user's script, which builds its models itself."""
    return any(isinstance(step.workload, Script) for step in scenario.steps)


def is_switched_on(changed: Scenario, script: Scenario) -> bool:
    """Whether ``changed`` is the scenario ``script`` with something switched on in its process, not with another script."""
    return changed.steps == script.steps and changed != script


def is_capsule(scenario: Scenario) -> bool:
    """Whether the scenario makes the one call of a capsule."""
    return any(step.model is not None and step.model.name.startswith(MODEL) for step in scenario.steps)


def _in_float32(step: dict[str, Any]) -> dict[str, Any]:
    plain = {"name": step["name"], "workload": step["workload"]}
    if step["model"] is None:
        return plain
    return plain | {"model": step["model"] | {"float32_twin": True}, "workload": _ONE_PASS}


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


def in_scripts(fix: str, otherwise: Change) -> Change:
    """Puts the correction that ``fix`` means into the model of a script; a scenario without one is changed ``otherwise``."""
    name, modules = correction_named(fix)

    def switch(scenario: Scenario) -> Scenario:
        present = scenario.model_dump()["corrections"]
        return scenario.with_changes(corrections=[*present, {"id": name, "modules": modules}])

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

    return lambda scenario: scenario.with_each_step(edit)


def with_options(model: str, **options: Any) -> Change:
    """Sets options of every model of this name; others have no such options."""

    def edit(step: dict[str, Any]) -> None:
        if step["model"] is not None and step["model"]["name"] == model:
            step["model"]["options"] |= options

    return lambda scenario: scenario.with_each_step(edit)


def with_autocast(dtype: str | None) -> Change:
    """Opens an autocast region of ``dtype`` around every workload that computes, or closes all of them; a script has its own."""

    def edit(step: dict[str, Any]) -> None:
        if step["workload"]["kind"] not in ("unload", "script"):
            step["autocast"] = None if dtype is None else (step["autocast"] or {}) | {"dtype": dtype}

    return lambda scenario: scenario.with_each_step(edit)


def autocast_of_model(scenario: Scenario) -> Scenario:
    """Gives every autocast region the dtype of the model inside it, where that is a 16-bit one."""
    dtype = None

    def edit(step: dict[str, Any]) -> None:
        nonlocal dtype
        if step["model"] is not None:
            dtype = step["model"]["dtype"]
        if step["autocast"] is not None and dtype in HALF:
            step["autocast"]["dtype"] = dtype

    return scenario.with_each_step(edit)


def fresh_process(scenario: Scenario) -> Scenario:
    """Leaves only the last model and what is done with it: what came before happened in another process, so to say."""
    steps = scenario.model_dump()["steps"]
    last = max(index for index, step in enumerate(steps) if step["model"] is not None or index == 0)
    return scenario.with_changes(steps=steps[last:])


CHANGES: dict[str, Change] = {
    "bfloat16": in_scripts("bfloat16", otherwise=with_model(dtype="bfloat16")),
    "autocast-dtype-of-model": autocast_of_model,
    "autocast-off": from_outside("autocast-off", otherwise=with_autocast(None)),
    "autocast-bfloat16": with_autocast("bfloat16"),
    "autocast-and-quant-state-dtype": all_of(autocast_of_model, with_corrections("quant-state-dtype")),
    "fresh-process": fresh_process,
    "eager-attention": with_conditions("eager-attention"),
    "compile-off": with_conditions("compile-off"),
    "loss-scale-one": with_conditions("loss-scale-one"),
}
"""How the fixes that are no corrections change a scenario, by id."""


def change_of(fix: Remedy) -> Change:
    """How a fix changes a scenario; a plug-in's says so itself."""
    if fix.change is not None:
        return fix.change
    correction = registered(Correction).get(fix.id)
    if correction is not None:
        return (with_corrections if correction.in_scripts else with_kernels)(fix.id)
    return CHANGES.get(fix.id) or in_scripts(fix.id, otherwise=lambda scenario: scenario)  # keep-float32:MODULES
