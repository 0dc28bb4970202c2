"""What a workload is given to work with."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.instrument.session import Instruments
from dtypedoctor.models.build import Built
from dtypedoctor.scenario.model import Scenario, ScenarioStep
from dtypedoctor.trace.events import Metric, ProbeLogProbs

PROBE_SEQUENCES = 2
PROBE_TOKENS = 24


@dataclass(slots=True, kw_only=True)
class Context:
    """One stage of a scenario at work.

    Attributes:
        built: model and tokenizer.
        region: makes the autocast region that the scenario asks for (a null context where it asks for none).
        scratch: a directory for files that libraries insist on writing.
        pause: what must hold still while the probe runs (correction counters).
        steps_completed: training steps done in this stage, kept by the workload.
    """

    scenario: Scenario
    stage: ScenarioStep
    built: Built
    device: torch.device
    instruments: Instruments
    region: Callable[[], AbstractContextManager[Any]]
    scratch: Path
    pause: list[Any] = field(default_factory=list)
    steps_completed: int = 0

    def metric(self, step: int, values: dict[str, float]) -> None:
        """Records the numbers of a finished training step."""
        finite = {name: float(value) for name, value in values.items() if isfinite(value)}
        writer = self.instruments.writer
        writer.write(
            Metric(n=writer.next_n(), step=step, values=finite, nonfinite=sorted(values.keys() - finite.keys()))
        )

    def probe(self, model: nn.Module, step: int) -> None:
        """Records the policy's token log-probabilities on a fixed batch, without a trace and without touching any state."""
        with self.instruments.probing(), _held(self.pause):
            values = token_log_probabilities(model, self.scenario.seed, self.device)
        writer = self.instruments.writer
        writer.write(ProbeLogProbs(n=writer.next_n(), step=step, values=values))


class _held:  # noqa: N801  (a context manager that reads like a verb)
    def __init__(self, counters: list[Any]) -> None:
        self._counters = counters

    def __enter__(self) -> None:
        for counter in self._counters:
            counter.paused = True

    def __exit__(self, *_: object) -> None:
        for counter in self._counters:
            counter.paused = False


def probe_tokens(vocabulary: int, seed: int, device: torch.device) -> Tensor:
    """The fixed probe batch: (2, 24) token ids from a generator of its own, the same for every run of a scenario."""
    generator = torch.Generator().manual_seed(seed)
    low = min(4, vocabulary - 1)  # ids below are special tokens of the builtin tokenizer
    return torch.randint(low, vocabulary, (PROBE_SEQUENCES, PROBE_TOKENS), generator=generator).to(device)


def token_log_probabilities(model: nn.Module, seed: int, device: torch.device) -> list[float | None]:
    """log p(token | tokens before it) for every token of the probe batch but the first of each sequence, in float32.

    The model is put into evaluation mode for the pass and back afterwards; an element that is not finite is None.
    """
    tokens = probe_tokens(int(model.config.vocab_size), seed, device)  # type: ignore[union-attr, arg-type]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[:, :-1].float()
    finally:
        model.train(training)
    values = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).flatten().tolist()
    return [value if isfinite(value) else None for value in values]
