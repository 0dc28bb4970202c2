"""Gradients where a backward pass leaves them, for programs in which no optimizer of torch's reads them.

An optimizer step measures all gradients it takes (``optimizer_samples.py``). Where none has been taken yet, the leaves of the graph that a
backward pass goes through are looked up, and what the pass has added up in them is measured when it is over.
"""

from torch import Tensor
from torch.autograd.graph import Node

from dtypedoctor.instrument.coverage import Coverage
from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.readable import values_of
from dtypedoctor.instrument.statistics import Rooted, local_part, measurable

MAX_NODES = 5_000
"""Nodes of one graph that are looked through."""


class LeafGradients:
    """The leaves of the graph of the backward pass that is running.

    Args:
        coverage: counts the gradients.
        names: knows the parameters' names.
    """

    def __init__(self, coverage: Coverage, names: Names) -> None:
        self._coverage = coverage
        self._names = names
        self._known: tuple[int, dict[int, tuple[int, str]]] = (-1, {})
        self._leaves: list[Tensor] = []
        self._claimed = False
        self._last = (0, 0)

    def before(self, tensors: list[Tensor]) -> None:
        """A backward pass begins at ``tensors``."""
        self._leaves = [] if self._claimed else leaves_of(tensors)

    def claim(self) -> None:
        """An optimizer takes the gradients, which are counted and measured with its step, and so will all later ones."""
        if not self._claimed:
            self._claimed = True
            self._coverage.gradients -= self._last[0]
            self._coverage.gradients_measured -= self._last[1]

    def after(self) -> list[Rooted]:
        """The gradients that the pass has left in them."""
        leaves, self._leaves = self._leaves, []
        known = self._parameters() if leaves else {}
        found = [(leaf, local_part(leaf.grad)) for leaf in leaves if leaf.grad is not None]
        named = [(*known.get(id(leaf), (0, "")), grad) for leaf, grad in found]
        return self._counted([(root, name or f"leaf {i}", grad) for i, (root, name, grad) in enumerate(named)])

    def returned(self, gradients: object) -> list[Rooted]:
        """The gradients that ``torch.autograd.grad`` returns."""
        found = gradients if isinstance(gradients, (tuple, list)) else ()
        return self._counted(
            [(0, f"gradient {i}", readable_part(g)) for i, g in enumerate(found) if isinstance(g, Tensor)]
        )

    def _counted(self, found: list[Rooted]) -> list[Rooted]:
        held = [one for one in found if measurable(one[-1])]
        self._coverage.gradients += len(found)
        self._coverage.gradients_measured += len(held)
        self._last = (len(found), len(held))
        return held

    def _parameters(self) -> dict[int, tuple[int, str]]:
        if self._known[0] != self._names.version:
            known = {id(t): (root, name) for root, name, t, _, is_buffer in self._names.tensors() if not is_buffer}
            self._known = (self._names.version, known)
        return self._known[1]


def readable_part(gradient: Tensor) -> Tensor:
    """The values of a gradient as a plain tensor, as far as they can be read: inside of ``vmap`` those of all rows."""
    values = values_of(gradient)
    return gradient if values is None else values


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    """The leaves that a backward pass from ``tensors`` reaches, as far as they are found among the first nodes."""
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen: set[Node] = set(waiting)
    leaves: list[Tensor] = []
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves
