"""The search for a smallest set of treatments, as a generator: it yields the sets to try and is sent their outcomes.

Three stages, each a generator over :class:`Round`:

* **narrow**, top-down. The candidates of one level stand in order of likelihood. Treating all of them passes and
  treating none does not, so somewhere a prefix passes while the one shorter by one candidate does not; bisection finds
  such a place, the last candidate of that prefix is required, and the search goes on among those before it with the
  required ones treated, until these alone pass. Each candidate found is then replaced by its children.
  One culprit costs at most ceil(log2(candidates)) + 1 probes where all are equally likely.
* **confirm**. Every set with one culprit left out is tried. Where treating more never hurts, none passes and that is
  the proof of 1-minimality. Where one passes, some treatment breaks something, and delta debugging takes over:
  leave out ever smaller chunks until no single treatment can be left out (ddmin's reduction to complements,
  Zeller and Hildebrandt 2002, https://doi.org/10.1109/32.988498).
* **repeat**. The two outcomes that everything rests on (nothing treated fails, the culprits treated pass) are taken again.

An unresolved outcome counts as not passing, never as a pass, so it can cost probes but cannot make the answer wrong.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import TypeAlias, TypeVar


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


NOTHING: frozenset[str] = frozenset()

_T = TypeVar("_T")


class Outcome(StrEnum):
    """What a run with some candidates treated came to."""

    PASS = "pass"
    """Healthy."""
    FAIL = "fail"
    """The failure that is being looked for."""
    UNRESOLVED = "unresolved"
    """It failed otherwise, so it says nothing about that failure."""


class Stage(StrEnum):
    """What a probe is for."""

    BASELINE = "baseline"
    NARROW = "narrow"
    CONFIRM = "confirm"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Sets whose outcomes the search asks for together; none of them depends on another's outcome.

    Attributes:
        sets: ids of the leaves to treat, one set for each outcome wanted; all different.
        suspects: ids of the nodes among which the next culprit is being looked for.
        attempt: 0 for the first time, n for the n-th repetition; a repetition must be run again.
    """

    sets: tuple[frozenset[str], ...]
    stage: Stage
    suspects: tuple[str, ...]
    attempt: int = 0


Asking: TypeAlias = Generator[Round, tuple[Outcome, ...], _T]


class BaselineError(Exception):
    """There is nothing to reduce: it must fail with nothing treated, and pass with everything treated.

    Attributes:
        nothing: outcome with nothing treated.
        everything: outcome with everything treated; None where it was not tried because ``nothing`` did not fail.
    """

    def __init__(self, nothing: Outcome, everything: Outcome | None) -> None:
        treated, outcome, wanted = ("nothing", nothing, Outcome.FAIL)
        if everything is not None:
            treated, outcome, wanted = ("everything", everything, Outcome.PASS)
        super().__init__(f"with {treated} treated the outcome is {outcome}, it must be {wanted}")
        self.nothing = nothing
        self.everything = everything


def search(roots: Sequence[Node], width: int, repeat: int) -> Asking[tuple[Node, ...]]:
    """Searches for a 1-minimal set of leaves that passes.

    Args:
        roots: a usable forest (:func:`~dtypedoctor.trials.search.require_usable`).
        width: most sets in a round. Above 1 the rounds get fewer and the probes more, because some are speculative.
        repeat: how often the outcomes with nothing and with the culprits treated are taken again.

    Returns:
        The culprits, most likely first; equally likely ones in the order of the forest.

    Raises:
        BaselineError: nothing treated does not fail, or everything treated does not pass.
    """
    yield from _baseline(roots)
    yield from _repeated(NOTHING, roots, repeat)
    found = leaves_of((yield from _narrowed(roots, width)))
    leaves = by_likelihood([leaf for root in roots for leaf in root.leaves() if leaf.id in found])
    culprits = yield from _confirmed(leaves, width)
    yield from _repeated(leaves_of(culprits), culprits, repeat)
    return tuple(culprits)


def _baseline(roots: Sequence[Node]) -> Asking[None]:
    (nothing,) = yield Round(sets=(NOTHING,), stage=Stage.BASELINE, suspects=_ids(roots))
    if nothing is not Outcome.FAIL:
        raise BaselineError(nothing, None)
    (everything,) = yield Round(sets=(leaves_of(roots),), stage=Stage.BASELINE, suspects=_ids(roots))
    if everything is not Outcome.PASS:
        raise BaselineError(nothing, everything)


def _repeated(treated: frozenset[str], suspects: Sequence[Node], repeat: int) -> Asking[None]:
    for attempt in range(1, repeat + 1):
        yield Round(sets=(treated,), stage=Stage.REPEAT, suspects=_ids(suspects), attempt=attempt)


def _narrowed(roots: Sequence[Node], width: int) -> Asking[list[Node]]:
    """Leaves that pass together, found level by level."""
    found = yield from _required(NOTHING, roots, width)
    while any(node.children for node in found):
        refined: list[Node] = []
        for position, node in enumerate(found):
            others = leaves_of([*refined, *found[position + 1 :]])
            refined += (yield from _required(others, node.children, width)) if node.children else [node]
        found = refined
    return found


def _required(base: frozenset[str], nodes: Sequence[Node], width: int) -> Asking[list[Node]]:
    """Nodes that pass when treated on top of ``base``, few of them; all ``nodes`` together are known to pass.

    That ``base`` alone does not pass is taken for granted, which saves a probe per node refined: it can be wrong only
    where treating more hurts, and then confirming finds it out.
    """
    required: list[Node] = []
    remaining = by_likelihood(nodes)
    while remaining:
        length = yield from _passing_prefix(base | leaves_of(required), remaining, width, ask_for_none=bool(required))
        if length == 0:
            break
        required.append(remaining[length - 1])
        remaining = remaining[: length - 1]
    return required


def _passing_prefix(base: frozenset[str], nodes: Sequence[Node], width: int, *, ask_for_none: bool) -> Asking[int]:
    """Length of a prefix of ``nodes`` that passes on top of ``base`` while the next shorter one does not.

    All ``nodes`` are known to pass. The empty prefix is tried first with ``ask_for_none``, else known not to pass.
    """
    masses = _masses(nodes)
    low, high = 0, len(nodes)
    lengths = (0, *_cuts(masses, low, high, width - 1)) if ask_for_none else _cuts(masses, low, high, width)
    while lengths:
        sets = tuple(base | leaves_of(nodes[:length]) for length in lengths)
        outcomes = yield Round(sets=sets, stage=Stage.NARROW, suspects=_ids(nodes[low:high]))
        for length, outcome in zip(lengths, outcomes, strict=True):
            if outcome is Outcome.PASS:
                high = length
                break
            low = length
        lengths = _cuts(masses, low, high, width)
    return high


def _masses(nodes: Sequence[Node]) -> list[float]:
    """Probability of each node to end the prefix that is looked for, up to a factor.

    Half of it is spread evenly, so that a culprit among the unlikely ones costs no more than about two probes extra.
    """
    weights = [node.likelihood() for node in nodes]
    total = sum(weights) or 1.0
    return [weight / total + 1 / len(nodes) for weight in weights]


def _cuts(masses: Sequence[float], low: int, high: int, count: int) -> tuple[int, ...]:
    """At most ``count`` lengths strictly between ``low`` and ``high`` that divide the probability mass evenly."""
    if high - low - 1 <= count:
        return tuple(range(low + 1, high))
    cumulative = list(accumulate(masses[low:high]))
    inner = range(len(cumulative) - 1)
    shares = (cumulative[-1] * part / (count + 1) for part in range(1, count + 1))
    nearest = {min(inner, key=lambda index: abs(cumulative[index] - share)) for share in shares}
    return tuple(low + 1 + index for index in sorted(nearest))


def _confirmed(leaves: list[Node], width: int) -> Asking[list[Node]]:
    """A 1-minimal subset of the leaves, which are known to pass; all of them where treating more never hurts."""
    smaller = yield from _without_a_chunk(leaves, len(leaves), width)
    return leaves if smaller is None else (yield from _ddmin(smaller, width))


def _ddmin(leaves: list[Node], width: int) -> Asking[list[Node]]:
    """A 1-minimal subset of the leaves, which are known to pass."""
    chunks = 2
    while True:
        chunks = min(chunks, len(leaves))
        smaller = yield from _without_a_chunk(leaves, chunks, width)
        if smaller is not None:
            leaves, chunks = smaller, max(chunks - 1, 2)
        elif chunks == len(leaves):
            return leaves
        else:
            chunks *= 2


def _without_a_chunk(leaves: Sequence[Node], chunks: int, width: int) -> Asking[list[Node] | None]:
    """The leaves less one of so many chunks of equal size, the least likely that can be spared; None if none can."""
    bounds = [len(leaves) * number // chunks for number in range(chunks + 1)]
    rests = [[*leaves[:start], *leaves[end:]] for start, end in pairwise(bounds)][::-1]
    for first in range(0, len(rests), width):
        batch = rests[first : first + width]
        sets = tuple(leaves_of(rest) for rest in batch)
        outcomes = yield Round(sets=sets, stage=Stage.CONFIRM, suspects=_ids(leaves))
        for rest, outcome in zip(batch, outcomes, strict=True):
            if outcome is Outcome.PASS:
                return rest
    return None


def _ids(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.id for node in nodes)
