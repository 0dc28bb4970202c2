"""What a reduction chooses from: a forest of candidates whose leaves are the things that can be treated."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Node", "by_likelihood", "cover", "leaves_of", "require_usable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A candidate. To treat a node is to treat every leaf below it.

    Only leaves are treated by themselves. Where an inner node does arithmetic of its own (a residual addition in a
    block), give that arithmetic a leaf under the node.

    Attributes:
        id: unique in the whole forest, e.g. a module's dotted name or the id of a correction.
        children: parts that it can be refined into; none for a leaf.
        weight: how likely a culprit is in it, relative to its siblings: finite and not negative, in any unit. None
            means 1 for a leaf, and the sum over the children otherwise.
    """

    id: str
    children: tuple["Node", ...] = ()
    weight: float | None = None

    def walk(self) -> Iterator["Node"]:
        """This node and all below it, parents before children."""
        yield self
        for child in self.children:
            yield from child.walk()

    def leaves(self) -> tuple["Node", ...]:
        """The leaves below it, in order; itself for a leaf."""
        return tuple(node for node in self.walk() if not node.children)

    def likelihood(self) -> float:
        """Its weight, with the defaults filled in."""
        if self.weight is not None:
            return self.weight
        return sum(child.likelihood() for child in self.children) if self.children else 1.0


def leaves_of(nodes: Sequence[Node]) -> frozenset[str]:
    """Ids of all leaves below the nodes: what is treated when the nodes are."""
    return frozenset(leaf.id for node in nodes for leaf in node.leaves())


def by_likelihood(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, most likely first; equally likely ones keep their order."""
    return sorted(nodes, key=lambda node: -node.likelihood())


def cover(roots: Sequence[Node], treated: frozenset[str]) -> tuple[str, ...]:
    """The fewest node ids that together stand for exactly the treated leaves, in the order of the forest."""
    ids: list[str] = []
    for node in roots:
        if leaves_of([node]) <= treated:
            ids.append(node.id)
        else:
            ids.extend(cover(node.children, treated))
    return tuple(ids)


def require_usable(roots: Sequence[Node]) -> None:
    """Checks a forest.

    Raises:
        ValueError: it is empty, an id occurs twice, or a weight is negative or not finite.
    """
    if not roots:
        raise ValueError("no candidates to choose from")
    seen: set[str] = set()
    for node in (node for root in roots for node in root.walk()):
        if node.id in seen:
            raise ValueError(f"candidate {node.id!r} occurs twice")
        weight = node.likelihood()
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"candidate {node.id!r} has the weight {weight}")
        seen.add(node.id)
