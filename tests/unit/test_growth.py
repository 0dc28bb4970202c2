"""How a training grew before it left the range: what `divergence` rests on."""

from dataclasses import replace

from nonfinite_examples import diverging

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.rules.nonfinite.divergence import growth_before, judge_divergence


def test_growth_goes_from_the_first_step_to_the_last() -> None:
    """Losses, gradients (a tenth of them) and weights of the two steps before the third."""
    growth = growth_before(diverging().build(), 3)
    assert growth is not None
    assert (growth.steps, growth.losses, growth.gradients, growth.weights) == (
        2,
        (1.0, 120.0),
        (0.1, 12.0),
        (0.25, 30.0),
    )
    assert growth.diverges
    before = growth_before(diverging().build(), 2)
    assert before is not None
    assert (before.steps, before.losses) == (1, (1.0, 1.0))
    assert not before.diverges


def test_a_training_diverges_only_where_it_ends_in_a_value_out_of_range() -> None:
    """The same growth before a finding of another kind, without a step or while generating is no divergence."""
    trace = diverging().build()
    found = {finding.id: finding for finding in diagnose(trace)}
    assert "divergence" in found
    end = replace(found["divergence"], id="float16-overflow")
    assert judge_divergence(trace, end) is not None
    for other in (
        replace(end, id="update-stall"),
        replace(end, step=None),
        replace(end, phase="generate"),
        replace(end, step=2),
    ):
        assert judge_divergence(trace, other) is None
