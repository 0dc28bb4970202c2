"""What a bisection has narrowed the candidates down to, while it goes on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtypedoctor.trials.bisection.questions import Measured
from dtypedoctor.trials.reduction import Outcome
from dtypedoctor.trials.search import Node, leaves_of

__all__ = ["Branch", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One line of the tree.

    Attributes:
        depth: 0 for the roots.
        name: the candidate; empty where several that are out of suspicion are told in one line.
        suspected: how many of its leaves may still be culprits.
        leaves: how many it has, or how many are told in this line.
        measured: the last probe that treated just this candidate.
    """

    depth: int
    name: str
    suspected: int
    leaves: int
    measured: Measured | None = None


class Progress:
    """Follows the probes of one question.

    A leaf is out of suspicion when a run was healthy without treating it. Where treating more can hurt that is not the last
    word, so this is for the eye; the reducer decides.

    Args:
        roots: the candidates.
    """

    def __init__(self, roots: Sequence[Node]) -> None:
        self._roots = tuple(roots)
        self.leaves = len(leaves_of(self._roots))
        self.suspected = leaves_of(self._roots)
        """The leaves that may still be culprits."""
        self._measured: dict[str, Measured] = {}

    def take(self, measured: Measured) -> None:
        """A probe has ended."""
        treated = measured.probe.treated
        if measured.probe.outcome is Outcome.PASS and len(treated) < len(self.suspected):
            self.suspected = treated
        if len(measured.names) == 1:
            self._measured[measured.names[0]] = measured

    def branches(self) -> list[Branch]:
        """The tree, opened where a part of a candidate is out of suspicion, parents before children."""
        return list(self._level(self._roots, 0))

    def _level(self, nodes: Sequence[Node], depth: int) -> Iterator[Branch]:
        cleared = 0
        for node in nodes:
            leaves = leaves_of([node])
            suspected = len(leaves & self.suspected)
            measured = self._measured.get(node.id)
            if not suspected and measured is None:
                cleared += len(leaves)
                continue
            yield Branch(depth=depth, name=node.id, suspected=suspected, leaves=len(leaves), measured=measured)
            if 0 < suspected < len(leaves):
                yield from self._level(node.children, depth + 1)
        if cleared:
            yield Branch(depth=depth, name="", suspected=0, leaves=cleared)
