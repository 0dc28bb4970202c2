"""The clipped ratio of a policy-gradient loss: is it 1 as long as nothing has been trained?

In reinforcement learning one model acts and another is trained on what the first has said of its actions. The ratio of
their probabilities is meant to be 1 while the weights are the same.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import saved_by
from dtypedoctor.instrument.module_tree import attribute_of, modules_in
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.trace.records.silent import FirstRatio

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

MAX_NODES = 2000
"""Nodes of the graph that are visited, the nearest to the loss first."""
NEAREST = 40
"""Nodes behind a ratio among which its log-softmax is looked for."""
_NORMALIZING = ("LogSoftmaxBackward", "LogsumexpBackward")
"""How nodes begin that make log-probabilities."""
_BETWEEN = (
    "ClampBackward", "MeanBackward", "SumBackward", "MulBackward", "DivBackward", "ViewBackward", "SqueezeBackward", "MaskedFillBackward",
)  # fmt: skip
"""Those of what is done with a difference of log-probabilities before its exponential."""
NEAR = 0.5
"""Magnitude of a log-ratio up to which it may be what rounding makes; further off is padding, or another policy."""
MOST = 0.9
"""Share of the elements that have to be near 1."""
_AT_RANDOM = ("p", "dropout", "attention_dropout")


class RatioCheck(Observer):
    """Writes a :class:`FirstRatio` for the first ratio whose backward pass begins.

    Whatever computed the two log-probabilities, and wherever: the ratio of a policy-gradient loss, exp(new - old), stands in the autograd
    graph of the loss, with its values. It is told by two bounds around 1, or by a log-softmax behind the new one. Before the first optimizer step the weights that drew the
    actions are the weights that are trained, so what the ratio is off by is the two ways of computing.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._over = False

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer step begins: from now on the weights may differ."""
        self._over = True

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass from ``tensors`` is about to begin."""
        if self._over or self.position.backward_depth:
            return
        with self.position.aside():
            ratio = next(_clipped_ratios(tensors), None) or next(_other_ratios(tensors), None)
            if ratio is not None:
                self._over = True
                self._tell(*ratio)

    def _tell(self, ratio: Tensor, bounds: Sequence[float]) -> None:
        gaps = ratio.detach().float().log().abs().flatten()
        near = gaps[gaps <= NEAR]
        if near.numel() < MOST * gaps.numel():
            return
        told = FirstRatio(
            elements=gaps.numel(),
            off=int(near.ne(0).sum()),
            largest_gap=float(near.max()),
            mean_gap=float(near.mean()),
            clipped=int(((ratio < bounds[0]) | (ratio > bounds[1])).sum()) if bounds else 0,
            bounds=list(bounds),
            random=any(is_random(module) for root in self.names.roots for module in modules_in(root)),
        )
        self.session.once(told, "")


def _clipped_ratios(tensors: list[Tensor]) -> Iterator[tuple[Tensor, tuple[float, float]]]:
    """Each clamp of a ratio in the graph behind ``tensors``, with its bounds."""
    for node in nodes_behind(tensors):
        if not node.name().startswith("ClampBackward"):
            continue
        low, high = saved_by(node, "min"), saved_by(node, "max")
        if not isinstance(low, int | float) or not isinstance(high, int | float) or not 0 <= low < 1 < high < 100:
            continue
        if _is_ratio(_made_by(node)):
            yield saved_by(node, "self"), (float(low), float(high))


def _other_ratios(tensors: list[Tensor]) -> Iterator[tuple[Tensor, Sequence[float]]]:
    """Each ratio of log-probabilities in the graph behind ``tensors``, without bounds."""
    for node in nodes_behind(tensors):
        if _is_ratio(node) and any(behind.name().startswith(_NORMALIZING) for behind in _behind([node], NEAREST)):
            yield saved_by(node, "result"), ()


def nodes_behind(tensors: list[Tensor], most: int = MAX_NODES) -> Iterator[Any]:
    """The autograd nodes that ``tensors`` were made by, the nearest first; no more levels once there are ``most``."""
    return _behind([t.grad_fn for t in tensors if t.grad_fn is not None], most)


def _behind(level: list[Any], most: int) -> Iterator[Any]:
    seen = set(level)
    while level and len(seen) < most:
        yield from level
        behind = dict.fromkeys(one for node in level for one, _ in node.next_functions)
        level = [node for node in behind if node is not None and node not in seen]
        seen.update(level)


def _is_ratio(node: Any) -> bool:
    """Whether a node is exp(new - old), in which only the new one is trained; the difference may be bounded, masked or averaged first."""
    if node is None or not node.name().startswith("ExpBackward"):
        return False
    difference = _made_by(node)
    while difference is not None and difference.name().startswith(_BETWEEN):
        difference = _made_by(difference)
    if difference is None or not difference.name().startswith("SubBackward"):
        return False
    (new, _), (old, _) = difference.next_functions
    return new is not None and old is None


def _made_by(node: Any) -> Any:
    return next((made_by for made_by, _ in node.next_functions if made_by is not None), None)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_random(module: nn.Module) -> bool:
    """Whether a module drops elements at random, or normalizes by its batch, as it is now."""
    if not module.training:
        return False
    drops = (attribute_of(module, name) for name in _AT_RANDOM)
    return isinstance(module, _BATCH_NORMS) or any(isinstance(p, float) and p > 0 for p in drops)
