"""Gradient scalers: each finding fires on one trace built by hand and is silent on its twin."""

from typing import Any

import pytest
from nonfinite_examples import gradient
from refusals import Story
from scaling_examples import scales, unscaling
from traces import TraceBuilder

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.rules.loss_scaling import detect_exhausted_scale, detect_scaling
from dtypedoctor.trace.events import ScalerState


def found_unscaling(message: str = "", **values: Any) -> list[Finding]:
    """The findings of a run in which a scaler unscaled once and that may have ended with ``message``."""
    return list(detect_scaling(unscaling(message, **values).ended()))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"strangers": 2}, "no module that was called"),
        ({"frozen": 4}, "frozen"),
        ({}, "does not depend|do not depend|loss does not"),
    ],
    ids=["strangers", "frozen", "disconnected"],
)
def test_why_no_gradient_was_found_is_told_apart(values: dict[str, Any], word: str) -> None:
    """Parameters of another model, frozen ones, and ones that the loss does not depend on."""
    (finding,) = found_unscaling("No inf checks were recorded for this optimizer.", gradients={}, **values)
    assert finding.id == "no-inf-checks"
    assert any(part in finding.cause for part in word.split("|"))


def test_bfloat16_trainables_are_a_warning_and_an_error_once_the_kernel_is_missing() -> None:
    """A CPU goes along, CUDA raises."""
    (warning,) = found_unscaling(params={"bfloat16": 4}, gradients={"bfloat16": 4}, names={"bfloat16": ["a.weight"]})
    assert (warning.id, warning.severity, warning.phase, warning.step) == (
        "scaler-bfloat16",
        Severity.WARNING,
        "static",
        None,
    )
    message = "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
    (error,) = found_unscaling(message, params={"bfloat16": 4}, gradients={"bfloat16": 4})
    assert (error.severity, error.phase) == (Severity.ERROR, "optimizer")


def test_a_run_that_is_over_before_its_first_step_has_trained_nothing() -> None:
    """A larger scale than ten halvings take away is a mistake of the run all the same, and one that has stepped once is none."""
    skipped = [(2.0 ** (24 - i), True) for i in range(10)]
    (finding,) = detect_exhausted_scale(scales(*skipped).ended())
    assert (finding.id, finding.severity) == ("loss-scale-exhausted", Severity.WARNING)
    assert not list(detect_exhausted_scale(scales(*skipped, (2.0**14, False)).ended()))


EXHAUSTED = {
    "floor": [(65536.0, True)] * 8,
    "slow backoff": [(2.0**24 * 0.95**i, True) for i in range(10)],
    "scale one": [(2.0 ** (4 - i), True) for i in range(5)],
    "endless": [(2.0 ** (30 - i), True) for i in range(21)],
}


def test_a_skipped_last_step_without_an_op_trace_is_the_scaler_at_work() -> None:
    """The run ends before the scaler can take the next step; a scale that cannot settle is another matter."""
    trace = TraceBuilder().sample("", 2.0, kind="loss", dtype="float32")
    trace.sample("lin", 1.0, inf=1, kind="grad_output", phase="backward")
    trace.add(ScalerState(n=trace.n(), step=1, scale=65536.0, found_inf=True, skipped=True))
    assert diagnose(trace.build()) == ()


def test_a_gradient_that_no_optimizer_takes_is_the_loss_scales_where_it_fits_without() -> None:
    """The pass through one network leaves gradients in the other, whose optimizer does not step: at scale 1 they fit."""
    trace = gradient(float32=2.0**20)
    trace.add(ScalerState(n=trace.n(), step=1, scale=2.0**16, found_inf=False, skipped=False))
    assert diagnose(trace.build()) == ()


def test_where_the_forward_pass_is_not_finite_the_scale_is_only_a_consequence() -> None:
    """The finding about the forward pass comes first."""
    story = scales(*EXHAUSTED["floor"]).sample("body", 1.0, inf=2)
    (finding,) = detect_exhausted_scale(story.build())
    assert finding.severity is Severity.WARNING


def test_deepspeeds_message_says_the_same() -> None:
    """It raises when it would have to go below its minimum."""
    story = Story().raised(
        "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", phase="optimizer"
    )
    assert [finding.id for finding in detect_exhausted_scale(story.ended())] == ["loss-scale-exhausted"]
