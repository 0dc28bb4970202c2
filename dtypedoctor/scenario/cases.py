"""The scenario that is meant where somebody names only a model."""

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import Model, registered
from dtypedoctor.scenario.catalog import resolve
from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.scenario.messages import in_words
from dtypedoctor.scenario.model import Scenario

__all__ = ["case_of"]

BUILTIN = "builtin:"

SETTINGS: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward"},
    "train": {"kind": "train", "steps": 4},
    "sft": {"kind": "sft", "steps": 4},
    "grpo": {"kind": "grpo", "steps": 4, "gradient_accumulation": 2},
    "generate": {"kind": "generate"},
}
"""Settings of a workload of which only the name was given; a shipped scenario that does the same keeps its own."""

_ONE_PASS = {"kind": "forward", "backward": True}
"""What is done where no workload was named."""


def case_of(model: str, dtype: str, workload: str | None = None) -> Scenario:
    """A scenario for ``model`` in ``dtype``.

    Without a workload it does what the shipped scenario of a builtin model does, and one forward and backward pass on random
    tokens with any other model. Nothing is expected of it.

    Raises:
        UsageError: the dtype or the workload is not one that a scenario could name.
    """
    if workload is not None and workload not in SETTINGS:
        raise UsageError(f"--workload: there is no workload {workload!r}", f"Known: {', '.join(SETTINGS)}.")
    shown_by = _case(model)
    shipped = load_scenario(resolve(shown_by)) if shown_by is not None else None
    step: dict[str, Any] = {"model": {"name": model, "dtype": dtype}, "workload": _ONE_PASS}
    if shipped is not None:
        step = shipped.model_dump()["steps"][0]
        step["model"]["dtype"] = dtype
    if workload is not None:
        own = step["workload"] if shipped is not None and step["workload"]["kind"] == workload else None
        step["workload"] = own or SETTINGS[workload]
    values: dict[str, Any] = {"name": _name(model), "summary": f"{model} in {dtype}.", "steps": [step]}
    if shipped is not None:
        values |= {"references": shipped.references, "seed": shipped.seed}
    try:
        return Scenario.model_validate(values)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
        raise UsageError(f"--{error['loc'][-1]}: {in_words(error)}") from refused


def _case(model: str) -> str | None:
    """The shipped scenario that shows what a builtin model is there for. Its random weights alone are too small to fail, so
    the outliers and adapters of the scenario are taken with it.
    """
    builtin = registered(Model).get(model.removeprefix(BUILTIN)) if model.startswith(BUILTIN) else None
    return builtin.case if builtin is not None else None


def _name(model: str) -> str:
    words = re.sub(r"[^a-z0-9_.-]+", "-", Path(model).name.lower() if ":" not in model else model.lower())
    return words.strip("-_.")[:100] or "model"
