"""The relative error of a run's first outputs against its float32 twin."""

import pytest
from traces import TraceBuilder

from dtypedoctor.lab.trials.judge import output_error
from dtypedoctor.trace.events import ProbeLogProbs
from dtypedoctor.trace.model import Trace

EXACT = [-1.0, -3.0, -5.0, -3.0]  # mean -3, root of the summed squared deviations √8


def run(*models: list[float | None]) -> Trace:
    """A trace that probed each model before its first step, and again after one."""
    trace = TraceBuilder()
    for step, values in enumerate(models):
        trace.add(ProbeLogProbs(n=trace.n(), step=step, values=values, untrained=True))
        trace.add(ProbeLogProbs(n=trace.n(), step=step + 1, values=[-9.0, -9.0, -9.0, -9.0]))
    return trace.build()


def test_equal_outputs_have_no_error() -> None:
    """What happens in training does not count."""
    assert output_error(run(EXACT), run(EXACT), 1) == 0


def test_the_error_is_relative_to_the_spread_of_the_exact_outputs() -> None:
    """One token off by √8 is an error of 1."""
    assert output_error(run([-1.0 + 8**0.5, -3.0, -5.0, -3.0]), run(EXACT), 1) == pytest.approx(1)


def test_the_worst_of_several_models_counts() -> None:
    """A second model that computes garbage is not averaged away."""
    other = [-1.0, -3.0, -5.0, -3.0 + 0.5 * 8**0.5]
    assert output_error(run(EXACT, other), run(EXACT, EXACT), 2) == pytest.approx(0.5)


def test_a_run_of_the_last_models_only_is_compared_with_those() -> None:
    """A remedy may leave out what came before."""
    other = [-2.0, -2.0, -4.0, -8.0]
    assert output_error(run(other), run(EXACT, other), 1) == 0
    assert output_error(run(EXACT), run(EXACT, other), 1) != 0


@pytest.mark.parametrize(
    ("ours", "twin", "models"),
    [
        pytest.param(run(EXACT), run(EXACT, EXACT), 2, id="a model was not reached"),
        pytest.param(run([-1.0, None, -5.0, -3.0]), run(EXACT), 1, id="an output was not finite"),
        pytest.param(run(), run(), 0, id="no model has a vocabulary"),
        pytest.param(run(EXACT), run(), 1, id="the twin did not run"),
        pytest.param(run(EXACT), run([-2.0, -2.0, -2.0, -2.0]), 1, id="nothing to be relative to"),
    ],
)
def test_an_error_that_cannot_be_measured_is_none(ours: Trace, twin: Trace, models: int) -> None:
    """None is not zero."""
    assert output_error(ours, twin, models) is None
