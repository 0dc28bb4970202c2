"""How a training grew before it left the range: what `divergence` rests on."""

from dataclasses import replace

from nonfinite_examples import diverging, replayed
from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.rules.nonfinite.rule import growth_before, judge_divergence


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


def test_a_training_that_its_first_update_has_ruined_is_described_by_that_update() -> None:
    """There is no growth from a first step to a last one to tell of."""
    trace = TraceBuilder()
    trace.sample("", 1.0, kind="loss", dtype="float32")
    trace.sample("out.weight", 0.3, kind="grad", phase="backward", dtype="float32")
    trace.sample("out.weight", 0.25, kind="initial", phase="optimizer", dtype="float32")
    trace.sample("out.weight", 3e3, kind="param", phase="optimizer", dtype="float32")
    product = trace.op(
        "aten.addmm.default", "out", [tensor(1, 900.0), tensor(2, 800.0)], [tensor(3, inf=1)], step=2, call=2
    )
    replayed(trace, product.n, 2e5)
    trace.sample("out", 6e4, inf=1, step=2, call=2).sample("", 6e4, inf=1, step=2, call=2)
    found = next(finding for finding in diagnose(trace.build()) if finding.id == "divergence")
    assert found.summary.startswith(
        "The training diverges: in its first update the largest weight goes from 0.25 to 3e+03."
    )
    assert found.cause.startswith("One update is many times as large as the weights")
    assert found.evidence[0] == "Largest gradient of that step: 0.3."
