"""Models that are built already when a worker starts, because it was forked from a process that built them."""

import torch

from dtypedoctor.models.build import Built, build
from dtypedoctor.scenario.model import Model, Scenario


class Stock:
    """Built models, each to be taken once.

    A forked worker has a stock of its own, so what it does to a model never reaches the next worker.
    """

    def __init__(self) -> None:
        self._built: dict[str, Built] = {}

    def fill(self, scenario: Scenario, device: torch.device) -> None:
        """Builds the scenario's models, the first of each kind where a scenario builds several alike.

        Raises:
            UsageError: a model cannot be built.
        """
        for step in scenario.steps:
            if step.model is not None and _key(step.model, device, scenario.seed) not in self._built:
                self._built[_key(step.model, device, scenario.seed)] = build(step.model, device, scenario.seed)

    def take(self, spec: Model, device: torch.device, seed: int) -> Built:
        """The model that ``spec`` asks for, out of the stock or built now.

        Raises:
            UsageError: it cannot be built.
        """
        found = self._built.pop(_key(spec, device, seed), None)
        return found if found is not None else build(spec, device, seed)


def _key(spec: Model, device: torch.device, seed: int) -> str:
    return f"{device} {seed} {spec.model_dump_json()}"
