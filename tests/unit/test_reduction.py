"""The reduction finds a 1-minimal set, exactly and within the probe bound, whatever the test does."""

import random
from collections.abc import Callable, Iterable
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtypedoctor.lab.trials.reduction import (
    BaselineError,
    Node,
    Outcome,
    Result,
    leaves_of,
    reduce,
)

Oracle = Callable[[frozenset[str]], Outcome]

MODULES = 128
NAMES = [f"m{index}" for index in range(MODULES)]
FLAT = tuple(Node(id=name) for name in NAMES)
BLOCKS = tuple(
    Node(id=f"block{block}", children=tuple(Node(id=name) for name in NAMES[8 * block : 8 * block + 8]))
    for block in range(16)
)
THREE_LEVELS = tuple(
    Node(
        id=f"block{block}",
        children=tuple(
            Node(id=f"block{block}.{part}", children=tuple(Node(id=name) for name in NAMES[start : start + 4]))
            for part, start in (("attn", 8 * block), ("mlp", 8 * block + 4))
        ),
    )
    for block in range(16)
)
SHAPES = {"flat": FLAT, "blocks": BLOCKS, "three-levels": THREE_LEVELS}

plantings = st.integers(1, 5).flatmap(lambda k: st.sets(st.sampled_from(NAMES), min_size=k, max_size=k))
shapes = st.sampled_from(sorted(SHAPES))


def flat(*names: str) -> list[Node]:
    """A forest of leaves."""
    return [Node(id=name) for name in names]


def outcome_of(healthy: bool) -> Outcome:
    """Passes or fails, never unresolved."""
    return Outcome.PASS if healthy else Outcome.FAIL


def needs(culprits: Iterable[str]) -> Oracle:
    wanted = frozenset(culprits)
    return lambda treated: outcome_of(wanted <= treated)


def bound(k: int) -> float:
    """Most probes allowed for k culprits among the 128 modules."""
    return 2 * k * log2(MODULES) + k


def draw_of(seed: int, treated: frozenset[str]) -> float:
    """A number in [0, 1) that is random but always the same for the same set."""
    return random.Random(f"{seed} {sorted(treated)}").random()


def assert_one_minimal(result: Result, oracle: Oracle) -> None:
    """Asks the oracle itself, and compares with what the result says."""
    culprits = frozenset(result.culprits)
    assert oracle(culprits) is Outcome.PASS
    assert result.without == {culprit: oracle(culprits - {culprit}) for culprit in culprits}
    assert Outcome.PASS not in result.without.values()
    assert result.one_minimal


@pytest.mark.parametrize("shape", sorted(SHAPES))
@given(culprits=plantings)
def test_planted_culprits_are_found_exactly_and_within_the_probe_bound(shape: str, culprits: set[str]) -> None:
    """k culprits that each must be treated cost at most 2 k log2(n) + k probes, sanity and 1-minimality included."""
    result = reduce(needs(culprits), SHAPES[shape])
    assert set(result.culprits) == culprits
    assert result.probes <= bound(len(culprits))
    assert result.monotone
    assert_one_minimal(result, needs(culprits))


@given(shape=shapes, others=plantings, pair=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)))
def test_of_a_pair_that_only_fails_together_one_is_found(shape: str, others: set[str], pair: tuple[str, str]) -> None:
    """Where treating either of two modules cures, one of them is enough, next to independent culprits."""

    def oracle(treated: frozenset[str]) -> Outcome:
        return outcome_of(others <= treated and bool(treated & set(pair)))

    result = reduce(oracle, SHAPES[shape])
    assert set(result.culprits) >= others
    assert len(set(result.culprits) - others) == (0 if others & set(pair) else 1)
    assert result.probes <= bound(len(result.culprits))
    assert_one_minimal(result, oracle)


@given(shape=shapes, pair=st.sets(st.sampled_from(NAMES), min_size=2, max_size=2))
def test_a_pair_that_must_be_treated_together_is_found(shape: str, pair: set[str]) -> None:
    """Where each alone changes nothing and both cure, both are found; where each alone makes it fail otherwise, too."""

    def oracle(treated: frozenset[str]) -> Outcome:
        found = len(treated & pair)
        return (Outcome.FAIL, Outcome.UNRESOLVED, Outcome.PASS)[found]

    for test in (needs(pair), oracle):
        result = reduce(test, SHAPES[shape])
        assert set(result.culprits) == pair
        assert result.probes <= bound(2)


@given(
    shape=shapes,
    culprits=plantings,
    poison=st.sampled_from(NAMES),
    antidote=st.sampled_from(NAMES),
    broken=st.sampled_from([Outcome.FAIL, Outcome.UNRESOLVED]),
)
def test_culprits_are_found_where_a_treatment_breaks_something_else(
    shape: str, culprits: set[str], poison: str, antidote: str, broken: Outcome
) -> None:
    """A module that must not be treated unless another one is does not end up in the answer, nor does that other one.

    Until it is known to be superfluous, that other one is looked for like a culprit, so it counts as one in the bound.
    """

    def oracle(treated: frozenset[str]) -> Outcome:
        if poison in treated and antidote not in treated:
            return broken
        return needs(culprits)(treated)

    result = reduce(oracle, SHAPES[shape])
    assert set(result.culprits) == (culprits | {antidote} if poison in culprits else culprits)
    assert result.probes <= bound(len(culprits | {antidote}))
    assert_one_minimal(result, oracle)


def forests(names: list[str]) -> st.SearchStrategy[list[Node]]:
    """Forests of any shape and weights over these leaves."""

    def nest(draw: Callable[..., object], part: list[str], depth: int) -> list[Node]:
        nodes: list[Node] = []
        while part:
            size = draw(st.integers(1, len(part)))
            weight = draw(st.none() | st.floats(0, 100))
            head, part = part[:size], part[size:]
            if size == 1 or depth == 0:
                nodes += [Node(id=name, weight=weight) for name in head]
            else:
                nodes.append(Node(id=f"{depth}:{head[0]}", children=tuple(nest(draw, head, depth - 1)), weight=weight))
        return nodes

    return st.composite(lambda draw: nest(draw, names, 3))()


@given(data=st.data(), count=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_any_test_whatever_ends_in_a_one_minimal_set(data: st.DataObject, count: int, seed: int) -> None:
    """Even outcomes without rhyme or reason end, after fewer than (n + 3)^2 probes, in a 1-minimal set."""
    roots = data.draw(forests(NAMES[:count]))

    def oracle(treated: frozenset[str]) -> Outcome:
        if not treated:
            return Outcome.FAIL
        if treated == leaves_of(roots):
            return Outcome.PASS
        return list(Outcome)[int(3 * draw_of(seed, treated))]

    result = reduce(oracle, roots)
    assert result.probes <= (count + 3) ** 2
    assert_one_minimal(result, oracle)


@given(culprits=plantings, weights=st.lists(st.floats(0, 1e6), min_size=MODULES, max_size=MODULES))
def test_misleading_weights_do_not_break_the_probe_bound(culprits: set[str], weights: list[float]) -> None:
    """Whatever the weights say, the culprits are found within the bound for equal ones."""
    roots = [Node(id=name, weight=weight) for name, weight in zip(NAMES, weights, strict=True)]
    result = reduce(needs(culprits), roots)
    assert set(result.culprits) == culprits
    assert result.probes <= bound(len(culprits))


def _marked(node: Node, name: str) -> Node:
    """The same tree with the weight of one leaf raised to 1000."""
    if not node.children:
        return Node(id=node.id, weight=1000.0 if node.id == name else None)
    return Node(id=node.id, children=tuple(_marked(child, name) for child in node.children))


@pytest.mark.parametrize(
    ("nothing", "everything", "message"),
    [
        (Outcome.PASS, Outcome.PASS, "with nothing treated the outcome is pass, it must be fail"),
        (Outcome.UNRESOLVED, Outcome.PASS, "with nothing treated the outcome is unresolved, it must be fail"),
        (Outcome.FAIL, Outcome.FAIL, "with everything treated the outcome is fail, it must be pass"),
        (Outcome.FAIL, Outcome.UNRESOLVED, "with everything treated the outcome is unresolved, it must be pass"),
    ],
)
def test_a_reduction_starts_only_where_no_treatment_fails_and_all_of_it_passes(
    nothing: Outcome, everything: Outcome, message: str
) -> None:
    """The refusal says which of the two is wrong, and a run that does not fail is not run with treatments at all."""
    asked: list[frozenset[str]] = []

    def oracle(treated: frozenset[str]) -> Outcome:
        asked.append(treated)
        return everything if treated else nothing

    with pytest.raises(BaselineError, match=f"^{message}$") as caught:
        reduce(oracle, flat("a", "b"))
    assert caught.value.nothing is nothing
    assert caught.value.everything is (everything if nothing is Outcome.FAIL else None)
    assert len(asked) == (2 if nothing is Outcome.FAIL else 1)


@pytest.mark.parametrize(
    ("roots", "message"),
    [
        ([], "no candidates"),
        (flat("a", "b", "a"), "'a' occurs twice"),
        ([Node(id="a", children=(Node(id="a"),))], "'a' occurs twice"),
        ([Node(id="a", weight=-1.0)], "'a' has the weight -1.0"),
        ([Node(id="a", weight=float("nan"))], "'a' has the weight nan"),
        ([Node(id="a", children=tuple(Node(id=i, weight=1e308) for i in "bc"))], "'a' has the weight inf"),
    ],
)
def test_an_unusable_forest_is_refused(roots: list[Node], message: str) -> None:
    """Empty forests, duplicate ids and impossible weights are named before any probe."""
    with pytest.raises(ValueError, match=message):
        reduce(needs("a"), roots)
