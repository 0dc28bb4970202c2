"""What a run came to, and what it says about another one's failure."""

import pytest

from dtypedoctor.lab.bisect.results import Kind, Symptom
from dtypedoctor.lab.bisect.symptoms import part_in_words, refused
from dtypedoctor.lab.trials.reduction import Outcome

NAN = Symptom(kind=Kind.NOT_FINITE, reason="inf or NaN")
DTYPE = Symptom(kind=Kind.DTYPE_ERROR, reason="RuntimeError", detail="RuntimeError")


@pytest.mark.parametrize(
    ("run", "failure", "outcome"),
    [
        (Symptom(kind=Kind.HEALTHY, reason="healthy"), NAN, Outcome.PASS),
        (NAN, NAN, Outcome.FAIL),
        (DTYPE, NAN, Outcome.UNRESOLVED),
        (DTYPE, DTYPE, Outcome.FAIL),
        (Symptom(kind=Kind.DTYPE_ERROR, reason="", detail="TypeError"), DTYPE, Outcome.UNRESOLVED),
        (refused("no such module\nmore"), NAN, Outcome.UNRESOLVED),
    ],
)
def test_only_the_same_kind_of_failure_counts_as_the_failure(run: Symptom, failure: Symptom, outcome: Outcome) -> None:
    """A run that fails otherwise says nothing."""
    assert run.outcome(failure) is outcome


def test_a_refusal_is_told_in_one_line() -> None:
    """Its message may span several."""
    assert refused("no such module\nmore").reason == "no such module"


def test_parts_are_told_as_a_person_would() -> None:
    """The tail of a dotted name, and whether the modules inside are meant."""
    assert part_in_words("model.layers.0.mlp::self") == "layers.0.mlp's own operators"
    assert part_in_words("model.layers.0.mlp") == "layers.0.mlp"
    assert part_in_words("::self") == "the outermost module's own operators"
