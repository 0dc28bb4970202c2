"""How a training grew before it left the range: what `divergence` rests on."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from nonfinite_examples import diverging, replayed
from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.rules.nonfinite.undefined import growth_before


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


def too_large(
    losses: Sequence[float] = (), *, fqn: str = "", given: float | None = None, origin: str = "input"
) -> Finding:
    """A power whose result no float32 holds, after calls with these losses; ``given`` is the magnitude of a tensor of the model."""
    trace = TraceBuilder()
    for call, loss in enumerate(losses, 1):
        trace.sample("0", loss, kind="loss", dtype="float32", call=call)
    call = len(losses) + 1
    if given is not None:
        data = tensor(1, given, dtype="float32", name="args.0", origin=origin)
        trace.op("aten.mul.Tensor", fqn, [data], [tensor(2, 5e24, dtype="float32")], call=call)
    power = trace.op(
        "aten.pow.Tensor_Scalar",
        fqn,
        [tensor(2, 5e24, dtype="float32")],
        [tensor(3, inf=1, dtype="float32")],
        call=call,
    )
    replayed(trace, power.n, 2.6e49, how="float64")
    trace.sample(fqn, 0.0, inf=1, dtype="float32", call=call)
    (finding,) = diagnose(trace.build())
    return finding


def advised(finding: Finding) -> str:
    """What to do in the place of what a domain error usually asks for."""
    instead = spec_of(finding.id).instead
    assert instead is not None
    return instead(finding)


@pytest.mark.parametrize("losses", [(), (0.3, 0.2, 0.1), (0.1, 0.3, 0.2, 0.9), (1.0, 5e3)])
def test_nothing_is_said_to_have_grown_that_was_not_measured_to(losses: tuple[float, ...]) -> None:
    """One call, a training that converges, one that is noisy and one that is too short show no growth, so nothing diverges."""
    finding = too_large(losses)
    assert finding.id == "domain-error"
    assert "grown" not in finding.cause
    assert "diverges" not in finding.cause
    assert "No growth that leads to it was measured" in finding.cause
    assert "Look at the input first" in advised(finding)


def test_values_that_grow_from_call_to_call_diverge() -> None:
    """Within one step of an optimizer that calls the model several times, too; the magnitudes are told."""
    finding = too_large((6.6, 3e3, 5e7, 1e21))
    assert "The loss has grown from 6.6 to 1e+21 in the calls before: the run diverges" in finding.cause
    assert advised(finding).startswith("Lower the learning rate")


def test_a_large_weight_is_named_and_an_ordinary_one_is_not() -> None:
    """The advice is to look at what is too large."""
    finding = too_large(fqn="net", given=1e25, origin="parameter")
    assert "the parameter args.0 already reaches 1e+25" in finding.cause
    assert advised(finding).startswith("Look at the weights first")
    ordinary = too_large(fqn="net", given=0.5, origin="parameter")
    assert "already reaches" not in ordinary.cause
    assert advised(ordinary).startswith("Look at the input first")


def test_an_argument_that_can_be_bounded_is_to_be() -> None:
    """exp(400) leaves float32 by its own argument."""
    assert advised(replace(too_large(), op="aten.exp.default")) == ""
    assert spec_of("domain-error").do_this == "Keep the argument where the function has a finite result."
