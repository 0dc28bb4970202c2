"""The tree of a bisection narrows as its probes come back."""

from collections.abc import Iterable

from dtypedoctor.cli.live import Branch, SuspectTree
from dtypedoctor.trials.bisection.questions import Measured
from dtypedoctor.trials.bisection.results import Kind, Symptom
from dtypedoctor.trials.reduction import Outcome, Probe, Stage
from dtypedoctor.trials.search import Node

BLOCKS = tuple(
    Node(id=f"layers.{i}", children=(Node(id=f"layers.{i}.attn"), Node(id=f"layers.{i}.mlp"))) for i in range(3)
)


def probe(treated: Iterable[str], outcome: Outcome, *names: str) -> Measured:
    """A probe that treated these leaves, under these names."""
    return Measured(
        question="modules",
        probe=Probe(
            number=1,
            treated=frozenset(treated),
            outcome=outcome,
            cached=False,
            stage=Stage.NARROW,
            suspects=(),
            attempt=0,
        ),
        names=names,
        symptom=Symptom(kind=Kind.HEALTHY, reason="healthy"),
        repeated=False,
    )


def shape(branches: list[Branch]) -> list[tuple[int, str, int, int]]:
    """Depth, name, suspected leaves and leaves of each line."""
    return [(branch.depth, branch.name, branch.suspected, branch.leaves) for branch in branches]


def test_at_first_everything_is_suspected() -> None:
    """The roots, closed."""
    progress = SuspectTree(BLOCKS)
    assert shape(progress.branches()) == [(0, f"layers.{i}", 2, 2) for i in range(3)]


def test_a_healthy_run_clears_what_it_left_alone() -> None:
    """What is cleared is told in one line, and the block that is left is still closed."""
    progress = SuspectTree(BLOCKS)
    progress.take(probe(["layers.1.attn", "layers.1.mlp"], Outcome.PASS, "layers.1"))
    assert shape(progress.branches()) == [(0, "layers.1", 2, 2), (0, "", 0, 4)]
    assert progress.branches()[0].measured is not None


def test_a_block_opens_where_a_part_of_it_is_cleared() -> None:
    """Its parts stand below it, one level in."""
    progress = SuspectTree(BLOCKS)
    progress.take(probe(["layers.1.mlp"], Outcome.PASS, "layers.1.mlp"))
    assert shape(progress.branches()) == [
        (0, "layers.1", 1, 2),
        (1, "layers.1.mlp", 1, 1),
        (1, "", 0, 1),
        (0, "", 0, 4),
    ]


def test_a_failing_run_clears_nothing() -> None:
    """That some treatments are not enough does not make the others needless; but it is shown at its module."""
    progress = SuspectTree(BLOCKS)
    failed = probe(["layers.0.attn", "layers.0.mlp"], Outcome.FAIL, "layers.0")
    progress.take(failed)
    assert len(progress.suspected) == progress.leaves == 6
    assert progress.branches()[0].measured is failed


def test_a_cleared_module_that_was_tried_keeps_its_line() -> None:
    """So that what came of it can still be read."""
    progress = SuspectTree(BLOCKS)
    progress.take(probe(["layers.0.attn", "layers.0.mlp"], Outcome.FAIL, "layers.0"))
    progress.take(probe(["layers.2.mlp"], Outcome.PASS, "layers.2.mlp"))
    assert (0, "layers.0", 0, 2) in shape(progress.branches())
