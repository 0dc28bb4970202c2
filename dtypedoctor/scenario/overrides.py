"""What the command line may change of a scenario."""

from typing import Any

from pydantic import ValidationError

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.messages import in_words
from dtypedoctor.scenario.model import Model, Scenario

__all__ = ["override"]


def override(
    scenario: Scenario,
    *,
    model: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    processes: int | None = None,
    watch_every: int | None = None,
) -> Scenario:
    """The scenario with other values where one is given; ``model`` and ``dtype`` go to every model in it.

    Outliers and options belong to the builtin model for which they were written, so another model is taken without them.

    Raises:
        UsageError: a value is not one that the scenario's file could hold.
    """
    given = {"device": device, "seed": seed, "watch_every": watch_every}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if processes is not None:
        changes["distributed"] = _distributed(scenario) | {"processes": processes}
    changes["steps"] = [
        step.model_dump() | ({"model": _changed(step.model, model, dtype)} if step.model else {})
        for step in scenario.steps
    ]
    try:
        return scenario.with_changes(**changes)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
        raise UsageError(f"--{error['loc'][-1] if error['loc'] else 'nproc'}: {in_words(error)}") from refused


def _distributed(scenario: Scenario) -> dict[str, Any]:
    return scenario.distributed.model_dump() if scenario.distributed is not None else {}


def _changed(model: Model, name: str | None, dtype: str | None) -> dict[str, Any]:
    values = model.model_dump()
    if name is not None and name != model.name:
        values |= {"name": name, "outliers": [], "options": {}}
    if dtype is not None:
        values["dtype"] = dtype
    return values
