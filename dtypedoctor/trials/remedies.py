"""Remedies: changes of a scenario that may cure a finding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtypedoctor.scenario.model import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of a scenario.

    Attributes:
        id: kebab-case id.
        summary: what it changes, one sentence.
        safe: whether it keeps the meaning of the run (an unsafe one may hide the failure instead of curing it).
        change: gives the changed scenario.
    """

    id: str
    summary: str
    safe: bool
    change: Callable[[Scenario], Scenario]


def with_correction(correction: str) -> Callable[[Scenario], Scenario]:
    """A change that switches on one correction."""

    def change(scenario: Scenario) -> Scenario:
        return scenario.with_changes(corrections=[*scenario.model_dump()["corrections"], {"id": correction}])

    return change


def with_model(**changes: Any) -> Callable[[Scenario], Scenario]:
    """A change of fields of every model of the scenario."""

    def change(scenario: Scenario) -> Scenario:
        steps = scenario.model_dump()["steps"]
        for step in steps:
            if step["model"] is not None:
                step["model"] |= changes
        return scenario.with_changes(steps=steps)

    return change


REMEDIES: dict[str, Remedy] = {
    remedy.id: remedy
    for remedy in (
        Remedy(
            id="gemma4-mlp-float32-product",
            summary="compute the MLP's gated product in float32 and hold it within ±65280",
            safe=True,
            change=with_correction("gemma4-mlp-float32-product"),
        ),
        Remedy(
            id="bfloat16",
            summary="load the model in bfloat16, which has float32's range",
            safe=True,
            change=with_model(dtype="bfloat16"),
        ),
    )
}
"""Every remedy by its id."""
