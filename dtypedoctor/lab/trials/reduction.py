"""Reduces a set of treatments to a smallest one that keeps a run healthy, given only a test. It knows nothing of runs.

The candidates are treatments: modules to keep in float32, or corrections to switch on. ``test(treated)`` runs with exactly these treated. There are
three stages:

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

from dtypedoctor.errors import UsageError


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


Test = Callable[[frozenset[str]], Outcome]
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One answer that the search was given.

    Attributes:
        treated: ids of the leaves that were treated, and no others.
        cached: the answer was known (from the log, or from earlier in this reduction), nothing was run.
    """

    treated: frozenset[str]
    outcome: Outcome
    cached: bool
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a reduction goes about it.

    Attributes:
        repeat: how often the two key outcomes, nothing treated and the culprits treated, are taken again.
        known: outcomes of earlier runs, in order. They are believed and not run again; later outcomes of the same set stand for its repetitions.
        on_probe: called with each answer, as it is recorded or found in the cache.
    """

    repeat: int = 0
    known: Iterable[tuple[frozenset[str], Outcome]] = ()
    on_probe: Callable[[Probe], None] = lambda probe: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A set whose repeated runs did not end alike, with all its outcomes in order."""

    treated: frozenset[str]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a reduction found.

    Attributes:
        culprits: ids of the leaves that must be treated for the run to be healthy, most likely first; equally likely ones in the order of the forest.
        without: for each culprit, the outcome of the probe that treated all the others but not it.
        probes: how many probes were run.
        unresolved: how many outcomes, those of the log included, were unresolved.
        monotone: no passing set was seen to stop passing when more was treated.
        disagreements: sets whose outcome changed when they were run again.
    """

    culprits: tuple[str, ...]
    without: Mapping[str, Outcome]
    probes: int
    unresolved: int
    monotone: bool
    disagreements: tuple[Disagreement, ...]

    @property
    def one_minimal(self) -> bool:
        """For every culprit a probe showed that leaving out it alone is not healthy."""
        return all(outcome is not Outcome.PASS for outcome in self.without.values())

    @property
    def flaky(self) -> bool:
        """An outcome changed when the same set was run again."""
        return bool(self.disagreements)


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


class Interrupted(Exception):  # noqa: N818 - an ending that still carries an answer, not an error
    """A reduction ended early, because no run could be made or Ctrl-C was pressed; the cause is chained.

    Attributes:
        best: the smallest set known to pass, or None where none is known yet. It need not be 1-minimal.
        probes: how many probes were run.
    """

    def __init__(self, best: frozenset[str] | None, probes: int) -> None:
        reached = "no passing set was known yet" if best is None else f"{len(best)} treated candidates pass"
        super().__init__(f"interrupted after {probes} probes: {reached}")
        self.best = best
        self.probes = probes


def reduce(test: Test, roots: Sequence[Node], options: Options | None = None) -> Result:
    """Finds a 1-minimal set of leaves that passes, calling the test for one set after the other.

    With k culprits that each must be treated, among n equally likely leaves, it needs at most
    k * (ceil(log2(n)) + 2) + 2 probes where the forest is flat and treating more never hurts.

    Args:
        test: runs with exactly these leaves treated.
        roots: the forest of candidates; a flat one for corrections, blocks over submodules over own arithmetic for a model.
        options: see :class:`Options`.

    Raises:
        BaselineError: nothing treated does not fail, or everything treated does not pass.
        Interrupted: the test or ``on_probe`` raised UsageError, or Ctrl-C was pressed.
        ValueError: the forest is empty, an id occurs twice, or a weight is negative or not finite.
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
    reducing = _Reducing(test, options or Options())
    try:
        return reducing.result(roots)
    except (UsageError, KeyboardInterrupt) as error:
        raise Interrupted(reducing.best, reducing.probes) from error


class _Reducing:
    """One reduction: what it has asked, and how it goes on."""

    def __init__(self, test: Test, options: Options) -> None:
        self._test = test
        self._repeat = options.repeat
        self._on_probe = options.on_probe
        self._runs: dict[frozenset[str], list[Outcome]] = {}
        """Every known outcome of a set, in order; the first one is what the search goes by."""
        for treated, outcome in options.known:
            self._runs.setdefault(treated, []).append(outcome)
        self.probes = 0

    @property
    def best(self) -> frozenset[str] | None:
        """The smallest set known to pass whenever it was run, or None."""
        passing = (treated for treated, runs in self._runs.items() if set(runs) == {Outcome.PASS})
        return min(passing, key=len, default=None)

    def result(self, roots: Sequence[Node]) -> Result:
        """Searches, and says what was found."""
        culprits = [leaf.id for leaf in self._culprits(roots)]
        first = {treated: runs[0] for treated, runs in self._runs.items()}
        return Result(
            culprits=tuple(culprits),
            without={culprit: first[frozenset(culprits) - {culprit}] for culprit in culprits},
            probes=self.probes,
            unresolved=sum(runs.count(Outcome.UNRESOLVED) for runs in self._runs.values()),
            monotone=_is_monotone(first),
            disagreements=tuple(
                Disagreement(treated=treated, outcomes=tuple(runs))
                for treated, runs in self._runs.items()
                if len(set(runs)) > 1
            ),
        )

    def _ask(self, treated: frozenset[str], stage: Stage, attempt: int = 0) -> Outcome:
        """What a set came to, out of the log or by a run; ``attempt`` n is its n-th repetition."""
        cached = len(self._runs.get(treated, ())) > attempt
        if not cached:
            outcome = self._test(treated)
            self._runs.setdefault(treated, []).append(outcome)
            self.probes += 1
        outcome = self._runs[treated][attempt]
        self._on_probe(Probe(treated=treated, outcome=outcome, cached=cached, stage=stage))
        return outcome

    def _culprits(self, roots: Sequence[Node]) -> list[Node]:
        nothing = self._ask(NOTHING, Stage.BASELINE)
        if nothing is not Outcome.FAIL:
            raise BaselineError(nothing, None)
        everything = self._ask(leaves_of(roots), Stage.BASELINE)
        if everything is not Outcome.PASS:
            raise BaselineError(nothing, everything)
        self._ask_again(NOTHING)
        # Leaves that pass together, found level by level
        required = self._required(NOTHING, roots)
        while any(node.children for node in required):
            refined: list[Node] = []
            for position, node in enumerate(required):
                others = leaves_of([*refined, *required[position + 1 :]])
                refined += self._required(others, node.children) if node.children else [node]
            required = refined
        narrowed = leaves_of(required)
        leaves = by_likelihood([leaf for root in roots for leaf in root.leaves() if leaf.id in narrowed])
        smaller = self._without_a_chunk(leaves, len(leaves))
        culprits = leaves if smaller is None else self._ddmin(smaller)
        self._ask_again(leaves_of(culprits))
        return culprits

    def _ask_again(self, treated: frozenset[str]) -> None:
        for attempt in range(1, self._repeat + 1):
            self._ask(treated, Stage.REPEAT, attempt)

    def _required(self, base: frozenset[str], nodes: Sequence[Node]) -> list[Node]:
        """Nodes that pass when treated on top of ``base``, few of them; all ``nodes`` together are known to pass.

        That ``base`` alone does not pass is taken for granted, which saves a probe per node refined: it can be wrong only
        where treating more hurts, and then confirming finds it out.
        """
        required: list[Node] = []
        remaining = by_likelihood(nodes)
        while remaining:
            treated = base | leaves_of(required)
            if required and self._ask(treated, Stage.NARROW) is Outcome.PASS:
                break
            length = self._passing_prefix(treated, remaining)
            required.append(remaining[length - 1])
            remaining = remaining[: length - 1]
        return required

    def _passing_prefix(self, base: frozenset[str], nodes: Sequence[Node]) -> int:
        """Length of a prefix of ``nodes`` that passes on top of ``base`` while the next shorter one does not."""
        # Probability of each node to end the prefix that is looked for, up to a factor
        weights = [node.likelihood() for node in nodes]
        total = sum(weights) or 1.0
        masses = [weight / total + 1 / len(nodes) for weight in weights]
        failing, passing = 0, len(nodes)
        while passing - failing > 1:
            # The length strictly between ``low`` and ``high`` that divides the probability mass most evenly
            cumulative = list(accumulate(masses[failing:passing]))
            nearest = min(range(len(cumulative) - 1), key=lambda index: abs(cumulative[index] - cumulative[-1] / 2))
            length = failing + 1 + nearest
            if self._ask(base | leaves_of(nodes[:length]), Stage.NARROW) is Outcome.PASS:
                passing = length
            else:
                failing = length
        return passing

    def _ddmin(self, leaves: list[Node]) -> list[Node]:
        """A 1-minimal subset of the leaves, which are known to pass."""
        chunks = 2
        while True:
            chunks = min(chunks, len(leaves))
            smaller = self._without_a_chunk(leaves, chunks)
            if smaller is not None:
                leaves, chunks = smaller, max(chunks - 1, 2)
            elif chunks == len(leaves):
                return leaves
            else:
                chunks *= 2

    def _without_a_chunk(self, leaves: Sequence[Node], chunks: int) -> list[Node] | None:
        """The leaves less one of so many chunks of equal size, the least likely that can be spared; None if none can."""
        bounds = [len(leaves) * number // chunks for number in range(chunks + 1)]
        for start, end in reversed(list(pairwise(bounds))):
            rest = [*leaves[:start], *leaves[end:]]
            if self._ask(leaves_of(rest), Stage.CONFIRM) is Outcome.PASS:
                return rest
        return None


def _is_monotone(outcomes: Mapping[frozenset[str], Outcome]) -> bool:
    """No passing set is part of a set that does not pass."""
    passing = [treated for treated, outcome in outcomes.items() if outcome is Outcome.PASS]
    others = [treated for treated, outcome in outcomes.items() if outcome is not Outcome.PASS]
    return not any(small < large for small in passing for large in others)
