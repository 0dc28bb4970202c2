"""How a training grew before it left the range: what `divergence` rests on."""

import pytest
from nonfinite_examples import diverging, replayed
from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import diagnose, spec_of
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.rules.nonfinite.undefined import growth_before
from dtypedoctor.trace.events import Metric


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


def test_a_loss_that_falls_without_bound_has_no_minimum() -> None:
    """What is measured is a magnitude, which grows; the number that the program has falls, as it is told to."""
    trace = diverging()
    for step, loss in ((1, -1.0), (2, -120.0)):
        trace.add(Metric(n=trace.n(), step=step, values={"loss": loss}))
    found = next(finding for finding in diagnose(trace.build()) if finding.id == "divergence")
    assert "the loss from -1 to -120" in found.summary
    assert "no minimum" in found.cause
    assert "learning rate," not in found.cause
    instead = spec_of("divergence").instead
    assert instead is not None
    assert instead(found).startswith("Look at the sign of the loss")


def too_large(op: str) -> Finding:
    """An operator whose result no float32 holds."""
    trace = TraceBuilder()
    given, result = tensor(1, 5e24, dtype="float32"), tensor(2, inf=1, dtype="float32")
    failing = trace.op(op, "", [given], [result])
    replayed(trace, failing.n, 2.6e49, how="float64")
    trace.sample("", 0.0, inf=1, dtype="float32")
    (finding,) = diagnose(trace.build())
    return finding


@pytest.mark.parametrize(("op", "advice"), [("aten.pow.Tensor_Scalar", "are too large"), ("aten.exp.default", "")])
def test_what_no_float32_holds_is_scaled_before_it_unless_its_own_argument_can_be_bounded(op: str, advice: str) -> None:
    """exp(400) leaves float32 by its own argument; a power does by what it is given."""
    finding = too_large(op)
    instead = spec_of(finding.id).instead
    assert finding.id == "domain-error"
    assert "larger than float32 can hold" in finding.cause
    assert instead is not None
    assert advice in instead(finding)
    assert bool(instead(finding)) == bool(advice)


def test_what_float32_does_to_a_divergence_in_half_precision_is_not_said_before_it_was_tried() -> None:
    """Rounding may drive it: a run in float32 is the first edit, and a smaller learning rate the next."""
    found = next(finding for finding in diagnose(diverging().build()) if finding.id == "divergence")
    assert "a run in float32 tells" in found.cause
    assert spec_of("divergence").edits[-1] == "lower-learning-rate"
