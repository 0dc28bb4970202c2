"""What a workload works with: one stage's model, device and instruments, random batches and the loss on them, and the probe batch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.interruptions import contained
from dtypedoctor.lab.models.build import Built
from dtypedoctor.lab.scenarios.model import Scenario, ScenarioStep
from dtypedoctor.trace.events import Metric, NotWatched, ProbeLogProbs

PROBE_SEQUENCES = 2
PROBE_TOKENS = 24
FIRST_ORDINARY = 4
"""Smaller ids are special tokens of the builtin tokenizer."""


def vocabulary_of(model: nn.Module) -> int | None:
    """Number of tokens that ``model`` knows; None for a model that does not say."""
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None) or getattr(getattr(config, "text_config", None), "vocab_size", None)
    return int(size) if isinstance(size, int) else None


def random_tokens(vocabulary: int, shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """Ordinary token ids of ``shape`` from a generator of their own, the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(FIRST_ORDINARY, vocabulary - 1), vocabulary, shape, generator=generator).to(device)


def token_log_probabilities(model: nn.Module, seed: int, device: torch.device) -> list[float | None]:
    """log p(token | tokens before it) for every token of the probe batch but the first of each sequence, in float32.

    The probe batch holds (2, 24) token ids; an encoder-decoder reads them and is asked to repeat them. The model is put into evaluation mode for the pass and back afterwards; an
    element that is not finite is None.
    """
    vocabulary = vocabulary_of(model)
    assert vocabulary is not None  # the caller has looked
    tokens = random_tokens(vocabulary, (PROBE_SEQUENCES, PROBE_TOKENS), seed, device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # what a decoder reads beside the encoder; nothing for a model without one
            both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            logits = model(input_ids=tokens, **({"decoder_input_ids": tokens} if both else {})).logits[:, :-1].float()
    finally:
        model.train(training)
    values = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).flatten().tolist()
    return [value if isfinite(value) else None for value in values]


@dataclass(slots=True)
class Holder:
    """The model that the process has at the moment; a stage may build another one or let it go."""

    built: Built | None = None


@dataclass(slots=True, kw_only=True)
class Context:
    """One stage of a scenario at work.

    Attributes:
        holder: where the model is kept; no workload keeps it elsewhere beyond its own return.
        region: makes the autocast region that the scenario asks for (a null context where it asks for none).
        scratch: a directory for files that libraries insist on writing.
        pause: what must hold still while the probe runs (correction counters).
        compiled: the model as ``torch.compile`` gave it back, where the stage asks for that.
        look_steps: as in :class:`dtypedoctor.lab.scenarios.model.Request`.
        steps_before: training steps that earlier stages have done.
        steps_completed: training steps done in this stage, kept by the workload.
    """

    scenario: Scenario
    stage: ScenarioStep
    holder: Holder
    device: torch.device
    instruments: Instruments
    region: Callable[[], AbstractContextManager[Any]]
    scratch: Path
    pause: list[Any] = field(default_factory=list)
    compiled: nn.Module | None = None
    look_steps: int | None = None
    steps_before: int = 0
    steps_completed: int = 0

    @property
    def built(self) -> Built:
        """Model and tokenizer.

        Raises:
            UsageError: an earlier stage has unloaded the model.
        """
        if self.holder.built is None:
            raise UsageError(
                f"the {self.stage.workload.kind} step has no model: it was unloaded before", "Give the step a `model`."
            )
        return self.holder.built

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            UsageError: the checkpoint has none.
        """
        if self.built.tokenizer is None:
            raise UsageError(
                f"the model has no tokenizer, and {self.stage.workload.kind} needs one",
                "Save one beside the weights (save_pretrained), or use the forward or train workload.",
            )
        return self.built.tokenizer

    @property
    def model(self) -> nn.Module:
        """What a workload calls: the model, compiled if the scenario asks for that."""
        return self.built.model if self.compiled is None else self.compiled

    def begin_step(self) -> None:
        """Says that the next step begins, for workloads without an optimizer, whose steps nobody else counts."""
        self.instruments.phases.begin_step(self.steps_before + self.steps_completed + 1)

    def metric(self, step: int, values: dict[str, float]) -> None:
        """Records the numbers of training step ``step`` of this stage (from 1), which is finished."""
        finite = {name: float(value) for name, value in values.items() if isfinite(value)}
        writer = self.instruments.writer
        writer.write(
            Metric(
                n=writer.next_n(),
                step=self.steps_before + step,
                values=finite,
                nonfinite=sorted(values.keys() - finite.keys()),
                spelled={name: str(float(value)) for name, value in sorted(values.items()) if name not in finite},
            )
        )

    def probe(self, step: int, *, untrained: bool = False) -> None:
        """Records the policy's token log-probabilities on a fixed batch, without a trace and without touching any state.

        The model is called as it is, not compiled, so that the probe causes no recompilation. Nothing is recorded for a
        model without a vocabulary.

        Args:
            step: the step of this stage after which this is.
            untrained: the stage has not begun yet.
        """
        model = self.built.model
        if vocabulary_of(model) is None:
            return
        with self.instruments.probing(), _held(self.pause), _layers_uncompiled(self.stage):
            values = token_log_probabilities(model, self.scenario.seed, self.device)
        writer = self.instruments.writer
        writer.write(
            ProbeLogProbs(n=writer.next_n(), step=self.steps_before + step, values=values, untrained=untrained)
        )

    def probe_untrained(self) -> None:
        """The probe before the stage's first step. A model that fails here will fail in its workload, where it is watched."""
        if vocabulary_of(self.built.model) is None:
            what = f"log-probabilities of {type(self.built.model).__name__}"
            self.instruments.writer.write(NotWatched(what=what, why="it has no config.vocab_size to draw tokens from"))
            return
        with contained() as refused, self.region():  # the workload will meet it again, watched
            self.probe(0, untrained=True)
        if refused.error is not None:
            why = f"the forward pass raises {type(refused.error).__name__}"
            self.instruments.writer.write(NotWatched(what="outputs before the first step", why=why))


@contextmanager
def _held(counters: list[Any]) -> Iterator[None]:
    for counter in counters:
        counter.paused = True
    try:
        yield
    finally:
        for counter in counters:
            counter.paused = False


def _layers_uncompiled(stage: ScenarioStep) -> AbstractContextManager[Any]:
    """Inside, layers that are compiled one by one run as they are; a model that is compiled whole is called beside its compiled form."""
    by_layers = stage.compile is not None and stage.compile.regions == "layers"
    return torch.compiler.set_stance("force_eager") if by_layers else nullcontext()


def training_tokens(context: Context, shape: tuple[int, int], number: int) -> Tensor:
    """Token ids of ``shape`` (batch, tokens): batch ``number`` (from 1) of the scenario's seed.

    Raises:
        UsageError: the model does not say how many tokens it knows.
    """
    model = context.built.model
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        raise UsageError(
            f"{type(model).__name__} has no config.vocab_size, so there are no tokens to give it",
            "Wrap it in a factory (package.module:factory) with config.vocab_size and a forward of input_ids and labels, or run a script.",
        )
    return random_tokens(vocabulary, shape, context.scenario.seed + number, context.device)


def language_model_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy of predicting ``tokens`` (batch, tokens); a scalar.

    Raises:
        UsageError: the model returns none.
    """
    loss = model(input_ids=tokens, labels=tokens).loss
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"{type(model).__name__} returns no loss for its labels",
            "Its forward must take input_ids and labels and return an object with `loss` and `logits`.",
        )
    return loss
