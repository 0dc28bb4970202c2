"""Two models with the same weights in different dtypes, asked the same: how far are their log-probabilities apart?

In reinforcement learning one of them acts and the other is trained on what the first has said of its actions. The ratio of
their probabilities is meant to be 1 while the weights are the same.
"""

import math
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.naming import Names, dtype_name
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import Twins

ROWS = 64
"""Distributions of a call that are kept for comparison."""
ELEMENTS = 8
"""Elements of each parameter by which weights are recognised as the same."""
LARGEST_INPUT = 1_000_000
"""Elements of an input that is kept to be recognised."""
LIKELY = math.log(1e-3)
"""Log-probability below which a choice is too unlikely to matter."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Answer:
    """What a half-precision model said, without gradients, to some input of whole numbers."""

    model: ReferenceType[nn.Module]
    question: Tensor
    scores: Tensor


class TwinCheck:
    """Writes a :class:`Twins` when a trained model is asked what its half-precision twin was asked."""

    def __init__(self, notes: Notes, names: Names, position: Position) -> None:
        self._notes = notes
        self._names = names
        self._position = position
        self._answers: dict[int, _Answer] = {}
        self._likeness: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call has returned."""
        question = _question(args, kwargs)
        first = next(module.parameters(), None)
        if question is None or first is None or self._position.backward_depth:
            return
        if not (self._answers if torch.is_grad_enabled() else first.dtype in HALF):
            return
        scores = _scores(output)
        with self._position.mute(), torch.no_grad():
            if scores is None:
                return
            if not scores.requires_grad:
                self._answers[self._like(module)] = _Answer(ref(module), question.clone(), _rows(scores).clone())
            elif (answer := self._answers.get(self._like(module))) is not None:
                self._compare(module, answer, question, scores)

    def _like(self, module: nn.Module) -> int:
        """Equal for models of the same class whose parameters have the same shapes."""
        known = self._likeness.get(module)
        if known is None:
            known = self._likeness[module] = hash(
                (type(module), *(p.shape for p in module.parameters() if not is_lazy(p)))
            )
        return known

    def _compare(self, trainer: nn.Module, answer: _Answer, question: Tensor, scores: Tensor) -> None:
        generator = answer.model()
        rows = _rows(scores)
        if generator is None or generator is trainer or rows.shape != answer.scores.shape:
            return
        if question.shape != answer.question.shape or not torch.equal(question, answer.question):
            return
        if not _same_weights(trainer, generator):
            return
        ours, theirs = rows.float().log_softmax(-1), answer.scores.float().log_softmax(-1)
        gap = (ours - theirs).abs()[ours > LIKELY]
        if not gap.numel():
            return
        compared = Twins(
            trainer=self._number(trainer),
            generator=self._number(generator),
            trainer_dtype=dtype_name(next(trainer.parameters())),
            generator_dtype=dtype_name(next(generator.parameters())),
            rows=rows.shape[0],
            choices=rows.shape[-1],
            largest_gap=float(gap.max()),
            mean_gap=float(gap.mean()),
            dropout=any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in trainer.modules()),
        )
        self._notes.once(compared, (compared.trainer, compared.generator))

    def _number(self, module: nn.Module) -> int | None:
        place = self._names.find(module)
        return place[0] if place is not None else None


def _question(args: Any, kwargs: Any) -> Tensor | None:
    """The first tensor of whole numbers among the arguments: tokens, states, observations by number."""
    for value in (*args, *kwargs.values()):
        if (
            isinstance(value, Tensor)
            and value.dtype in (torch.int64, torch.int32)
            and 0 < value.numel() <= LARGEST_INPUT
        ):
            return value
    return None


def _scores(output: Any) -> Tensor | None:
    """The first result that can hold scores of several choices for several cases."""
    return next((t for _, t in tensors_in(output) if t.dim() >= 2 and t.shape[-1] >= 2 and t.numel()), None)


def _rows(scores: Tensor) -> Tensor:
    rows = scores.detach().reshape(-1, scores.shape[-1])
    return rows[:: max(1, len(rows) // ROWS)][:ROWS]


def _same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether the weights of one model are those of the other, rounded to its dtype; judged by a few elements of each."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    if all(a.dtype == b.dtype for a, b in pairs) or not all(measurable(a) and measurable(b) for a, b in pairs):
        return False
    ours = torch.cat([_few(a).to(b.dtype).float() for a, b in pairs])
    theirs = torch.cat([_few(b).float() for _, b in pairs])
    return torch.equal(ours, theirs)


def _few(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
