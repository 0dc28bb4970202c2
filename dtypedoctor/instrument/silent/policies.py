"""Two ways of computing one policy's log-probabilities: how far are they apart?

In reinforcement learning one model acts and another is trained on what the first has said of its actions. The ratio of
their probabilities is meant to be 1 while the weights are the same.
"""

import math
from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypedoctor._torch_private import saved_by
from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import FirstRatio, Twins
from dtypedoctor.values import dataclass

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

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names, self._position = session.names, session.position
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
        if not gap.numel() or not bool(gap.isfinite().all()):
            return  # NaN or a masked choice on one side: there is no distance to tell
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
        self._session.once(compared, (compared.trainer, compared.generator))

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


MAX_NODES = 2000
"""Nodes of the graph that are visited, the nearest to the loss first."""
NEAR = 0.5
"""Magnitude of a log-ratio up to which it may be what rounding makes; further off is padding, or another policy."""
MOST = 0.9
"""Share of the elements that have to be near 1."""
_AT_RANDOM = ("p", "dropout", "attention_dropout")


class RatioCheck:
    """Writes a :class:`FirstRatio` for the first clipped ratio whose backward pass begins.

    Whatever computed the two log-probabilities, and wherever: the clipped ratio of a policy-gradient loss, exp(new - old) between two
    bounds around 1, stands in the autograd graph of the loss, with its values. Before the first optimizer step the weights that drew the
    actions are the weights that are trained, so what the ratio is off by is the two ways of computing.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names, self._position = session.names, session.position
        self._over = False

    def before_step(self) -> None:
        """An optimizer step begins: from now on the weights may differ."""
        self._over = True

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass from ``tensors`` is about to begin."""
        if self._over or self._position.backward_depth:
            return
        with self._position.mute(), torch.no_grad():
            found = next(_clipped_ratios(tensors), None)
            if found is not None:
                self._over = True
                self._tell(*found)

    def _tell(self, ratio: Tensor, bounds: tuple[float, float]) -> None:
        gaps = ratio.detach().float().log().abs().flatten()
        near = gaps[gaps <= NEAR]
        if near.numel() < MOST * gaps.numel():
            return
        told = FirstRatio(
            elements=gaps.numel(),
            off=int(near.ne(0).sum()),
            largest_gap=float(near.max()),
            mean_gap=float(near.mean()),
            clipped=int(((ratio < bounds[0]) | (ratio > bounds[1])).sum()),
            bounds=list(bounds),
            random=any(_is_random(module) for root in self._names.roots for module in root.modules()),
        )
        self._session.once(told, "")


def _clipped_ratios(tensors: list[Tensor]) -> Iterator[tuple[Tensor, tuple[float, float]]]:
    """Each clamp of a ratio in the graph behind ``tensors``, with its bounds."""
    for node in _nodes_behind(tensors):
        if not node.name().startswith("ClampBackward"):
            continue
        bounds = _around_one(node)
        if bounds is not None and _is_ratio(_made_by(node)):
            yield saved_by(node, "self"), bounds


def _nodes_behind(tensors: list[Tensor]) -> Iterator[Any]:
    """The autograd nodes that ``tensors`` were made by, the nearest first; no more levels once there are :data:`MAX_NODES`."""
    level: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(level)
    while level and len(seen) < MAX_NODES:
        yield from level
        behind = dict.fromkeys(one for node in level for one, _ in node.next_functions)
        level = [node for node in behind if node is not None and node not in seen]
        seen.update(level)


def _around_one(clamp: Any) -> tuple[float, float] | None:
    low, high = saved_by(clamp, "min"), saved_by(clamp, "max")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    return (float(low), float(high)) if 0 <= low < 1 < high < 100 else None


def _is_ratio(node: Any) -> bool:
    """Whether a node is exp(new - old), in which only the new one is trained; the difference may be bounded first."""
    if node is None or not node.name().startswith("ExpBackward"):
        return False
    difference = _made_by(node)
    while difference is not None and difference.name().startswith("ClampBackward"):
        difference = _made_by(difference)
    if difference is None or not difference.name().startswith("SubBackward"):
        return False
    (new, _), (old, _) = difference.next_functions
    return new is not None and old is None


def _made_by(node: Any) -> Any:
    return node.next_functions[0][0] if node.next_functions else None


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _is_random(module: nn.Module) -> bool:
    if not module.training:
        return False
    drops = (getattr(module, name, None) for name in _AT_RANDOM)
    return isinstance(module, _BATCH_NORMS) or any(isinstance(p, float) and p > 0 for p in drops)
