"""The error budget: how much of the rounding error of the loss, and of the gradients, the operators of each module make.

To first order, rounding in one operator changes the loss by the sum of error times gradient over the elements of its result (H. Menon et al., *ADAPT: Algorithmic
Differentiation Applied to Floating-Point Precision Tuning*, SC18). A look has the error: the same operator on the same operands in float64. The backward pass has the
gradient, and there the operator's own gradients are compared with those of float64.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtypedoctor._torch_private import OpOverload, register_own, schema_of, sequence_number, version_of
from dtypedoctor.instrument.operators import (
    Arguments,
    bytes_of,
    fits,
    in_wider,
    node_of_operator,
    tensors_of,
    tree_map,
    written,
)
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.policies import nodes_behind
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.trace.records.silent import RoundingShare

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

_NARROW = (*HALF, torch.float32)
"""What becomes float64."""
_ALL_NODES = 1 << 20
_KEPT = torch.bfloat16
"""Errors need few digits, and float32's range."""


@dataclass(frozen=True)
class _Rounded:
    """An operator that has rounded, until the backward pass comes to it.

    Attributes:
        errors: of its results, in the order in which the backward pass brings their gradients.
        versions: of its operands, which may be overwritten meanwhile.
    """

    module: str
    operator: str
    source: str
    func: Any
    arguments: Arguments
    versions: Sequence[int]
    errors: Sequence[Tensor]


@dataclass
class _Share:
    """What the operators of one module have come to: changes of the loss by line, their squares element by element, squares of gradients and of their errors."""

    changes: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    squares: float = 0.0
    gradients: float = 0.0
    errors: float = 0.0


class ErrorBudget(Observer):
    """Writes a :class:`RoundingShare` for each module after a backward pass of operators that were looked at.

    Attributes:
        is_asked_for: nothing is done before somebody sets this: it takes as long as the program's own operators, several times, and memory for the errors.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self.is_asked_for = False
        self._rounded: dict[int, _Rounded] = {}
        self._hooks: list[Any] = []
        self._pass: dict[str, _Share] = {}
        self._total: dict[str, list[_Share]] = defaultdict(list)

    def saw(self, seen: Seen) -> None:
        """An operator has run in a module that is looked at."""
        if self.is_asked_for and seen.node is not None:
            self._keep(seen.node, seen.func, seen.arguments, seen.results or written(seen.func, seen.given))

    def follows(self, func: Any) -> bool:
        """Outside of modules, where losses are computed, all operators are heard of that write to none of their operands."""
        return self.is_asked_for and isinstance(func, OpOverload) and not schema_of(func).is_mutable

    def ran(self, func: Any, arguments: Arguments, result: Any) -> None:
        """Such an operator has run."""
        node = node_of_operator()
        if node is not None:
            with self.position.aside():
                self._keep(node, func, arguments, tensors_of(result))

    def _keep(self, node: int, func: Any, arguments: Arguments, results: Sequence[Tensor]) -> None:
        operands = tensors_of(arguments)
        if not any(result.dtype in HALF for result in results) or not all(map(measurable, operands[:1])):
            return
        if not fits(bytes_of([*operands, *results], 8), results[0].device):
            self.session.guard.tell(
                "large operators, in the error budget", "their float64 form would take too much memory"
            )
            return
        exact = in_wider(func, arguments, torch.float64, _NARROW, {})
        source, module = self.here()
        errors = [(result.double() - wide).to(_KEPT) for result, wide in zip(results, exact, strict=False)]
        if errors:
            versions = list(map(version_of, operands))
            self._rounded[node] = _Rounded(module or "", str(func), source or "", func, arguments, versions, errors)

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins: of what was looked at, hears of each operator's gradients."""
        if not self._rounded or self.position.backward_depth or any(tensor.numel() != 1 for tensor in tensors):
            return
        with self.position.aside():
            loss = abs(sum(float(tensor) for tensor in tensors)) or 1.0
        self._pass = defaultdict(_Share)
        for node in nodes_behind(tensors, _ALL_NODES):
            rounded = self._rounded.get(sequence_number(node))
            if rounded is not None:
                listen = self.session.guard.shield(
                    partial(self._came_to, rounded, loss), "gradients, in the error budget"
                )
                self._hooks.append(register_own(node.register_hook, listen))

    def _came_to(
        self, rounded: _Rounded, loss: float, made: Sequence[Tensor | None], got: Sequence[Tensor | None]
    ) -> None:
        """The backward pass has computed the gradients of an operator's operands."""
        share = self._pass[rounded.module]
        with self.position.aside():
            for error, gradient in zip(rounded.errors, got, strict=False):
                if gradient is not None and gradient.shape == error.shape:
                    changes = error.double() * gradient.double() / loss
                    share.changes[rounded.operator, rounded.source] += float(changes.sum())
                    share.squares += float(changes.square().sum())
            for gradient, exact in zip(made, _exact_gradients(rounded, got), strict=False):
                if gradient is not None and exact is not None and gradient.shape == exact.shape:
                    share.gradients += float(exact.square().sum())
                    share.errors += float((gradient.double() - exact).square().sum())

    def after_backward(self) -> None:
        """It has ended: tells what the passes have come to so far."""
        if self.position.backward_depth:
            return
        while self._hooks:
            self._hooks.pop().remove()
        self._rounded.clear()
        for module, share in self._pass.items():
            self._total[module].append(share)
            self.session.emit(_told(self._total[module]), fqn=module)
        self._pass = {}

    def stop(self) -> None:
        """The program has ended."""
        if self.is_asked_for and not self._total:
            self.session.guard.tell(
                "the error budget", "no operator in half precision that was looked at has led to a loss"
            )


def _exact_gradients(rounded: _Rounded, got: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of an operator's operands in float64, for the same gradients of its results; none where an operand was overwritten meanwhile."""
    if list(map(version_of, tensors_of(rounded.arguments))) != list(rounded.versions):
        return ()
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if not measurable(value):
            return torch.float64 if value in _NARROW else value
        leaves.append(value.double().requires_grad_())
        return leaves[-1]

    # Saved for us, not for hooks of the program
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        args, kwargs = tree_map(leaf, rounded.arguments)
        ends = [
            (result, gradient.double())
            for result, gradient in zip(tensors_of(rounded.func(*args, **kwargs)), got, strict=False)
            if gradient is not None and result.requires_grad and result.shape == gradient.shape
        ]
        if not ends:
            return ()
        results, gradients = zip(*ends, strict=True)
        exact: Sequence[Tensor | None] = torch.autograd.grad(results, leaves, gradients, allow_unused=True)
        return exact


def _told(shares: Sequence[_Share]) -> RoundingShare:
    """The mean of passes, as it is written."""
    changes: dict[tuple[str, str], float] = defaultdict(float)
    for share in shares:
        for key, change in share.changes.items():
            changes[key] += change / len(shares)
    operator, source = max(changes, key=lambda key: abs(changes[key]), default=("", ""))
    gradients = sum(share.gradients for share in shares)
    return RoundingShare(
        passes=len(shares),
        loss=sum(changes.values()),
        expected=(sum(share.squares for share in shares) / len(shares)) ** 0.5,
        gradients=(sum(share.errors for share in shares) / gradients) ** 0.5 if gradients else None,
        op=operator,
        source=source,
    )
