"""Parity of two runs' policies."""

import math

import pytest
from traces import TraceBuilder

from dtypedoctor.lab.trials.judge import parity
from dtypedoctor.trace.events import Metric, ProbeLogProbs
from dtypedoctor.trace.model import Trace


def run(*steps: list[float | None], rewards: tuple[float, ...] = ()) -> Trace:
    trace = TraceBuilder()
    for number, values in enumerate(steps, start=1):
        trace.add(ProbeLogProbs(n=trace.n(), step=number, values=values))
    for number, reward in enumerate(rewards, start=1):
        trace.add(Metric(n=trace.n(), step=number, values={"reward": reward}))
    return trace.build()


def test_the_divergence_is_the_mean_of_exp_d_minus_d_minus_one() -> None:
    """One token 0.5 below the reference and one equal: half of exp(0.5) - 0.5 - 1."""
    found = parity(run([-1.5, -2.0]), run([-1.0, -2.0]))
    assert found is not None
    assert found.max_kl == pytest.approx((math.exp(0.5) - 1.5) / 2)


def test_a_step_with_a_probability_that_is_not_finite_is_not_compared() -> None:
    """A missing value spoils its step, not the others."""
    found = parity(run([-1.0, None], [-1.0, -1.0]), run([-1.0, -1.0], [-1.0, -1.0]))
    assert found is not None
    assert found.steps_compared == 1


def test_runs_without_a_shared_step_cannot_be_compared() -> None:
    """No steps, no numbers."""
    assert parity(run(), run([-1.0])) is None
