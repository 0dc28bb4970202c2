"""Findings about what goes wrong in silence, from observations made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
from silent_examples import (
    absorbed,
    correction,
    moments,
    pretrained,
    refused,
    rotary,
    router,
    scaled,
    seen,
    state_loaded,
    summed_gradient,
    updates,
)
from traces import TraceBuilder

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.nonfinite_origin import is_unsettled
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.diagnosis.wording import percent
from dtypedoctor.report.verdict import _done
from dtypedoctor.trace.events import Metric, Observed, ParameterNote, ScalerState


def only(trace: TraceBuilder) -> Finding:
    """The one finding in a trace."""
    (finding,) = diagnose(trace.build())
    return finding


@pytest.mark.parametrize(
    ("names", "said"), [("a", "1 parameter is not training"), ("ab", "2 parameters are"), ("abc", "3 parameters are")]
)
def test_parameters_that_stall_are_counted_and_named(names: str, said: str) -> None:
    """One is a parameter, two are parameters."""
    one = {"wanted": 64, "lost": 64, "dtype": "bfloat16", "elements": 32, "absmax": 1.0, "update": 1e-5}
    trace = seen("updates", optimizer="AdamW", lr=1e-5, checks=2, first_step=1, wanted=64 * len(names),
                 lost=64 * len(names), parameters={f"{name}.weight": one for name in names})  # fmt: skip
    summary = only(trace).summary
    assert summary.startswith(said)
    assert summary.endswith(f"({', '.join(f'{name}.weight' for name in names)}).")


def test_a_few_weights_that_stall_do_not_speak_before_a_router_that_flips() -> None:
    """Where most of what is trained stands still, that comes first."""
    for moving, order in ((0, ["update-stall", "router-flip"]), (640, ["router-flip", "update-stall"])):
        trace = updates(moving=moving)
        for record in router(18).build().all(Observed):
            trace.add(record)
        assert [finding.id for finding in diagnose(trace.build())] == order


def test_a_parameter_whose_gradient_is_all_rounding_is_not_called_stalled() -> None:
    """The bias of an attention's keys has none in exact arithmetic, so there is nothing that is lost."""
    assert diagnose(summed_gradient("attn.k.bias", 0.02).build()) == ()
    assert only(summed_gradient("attn.q.bias", 5.0)).id == "update-stall"


@pytest.mark.parametrize(
    ("elements", "steady", "stalls"),
    [(1, 0.3, False), (1, 1.0, True), (1, None, True), (16, 0.4, False), (64, 0.3, True)],
)
def test_a_gradient_that_changes_its_sign_leads_nowhere(elements: int, steady: float | None, stalls: bool) -> None:
    """Of a few elements whose module is not seen: a bias before a softmax. Many elements, and what older traces do not say, count as before."""
    one = {
        "wanted": 64,
        "lost": 64,
        "dtype": "bfloat16",
        "absmax": 1.0,
        "update": 1e-5,
        "elements": elements,
        "steady": steady,
    }
    trace = seen(
        "updates", optimizer="AdamW", lr=1e-5, checks=8, first_step=1, parameters={"b": one}, wanted=64, lost=64
    )
    assert [finding.id for finding in diagnose(trace.build())] == ["update-stall"] * stalls


@pytest.mark.parametrize(("others", "severity"), [(32 * 99, Severity.INFO), (32 * 9, Severity.WARNING)])
def test_few_weights_that_stall_beside_others_are_a_note(others: int, severity: Severity) -> None:
    """Their share of what is trained is told, and that the rest trains; from a twentieth on it is a warning. Frozen weights do not count."""
    trace = updates(moving=640)
    for name, size, trained in (
        ("norm.weight", 32, True),
        ("up.weight", others, True),
        ("frozen.weight", 10**6, False),
    ):
        note = ParameterNote(
            n=trace.n(), name=name, owner="", dtype="bfloat16", shape=[size], root=0, requires_grad=trained
        )
        trace.add(note)
    finding = only(trace)
    assert finding.severity is severity
    assert finding.summary.endswith(f"They are {percent(32 / (32 + others))} of the trained weights.")
    assert "The other parameters train" in finding.cause


@pytest.mark.parametrize(
    ("trace", "severity"),
    [
        (absorbed("aten.clamp.default", "-65504", "65504", error=0.0), Severity.WARNING),
        (absorbed("aten.where.self", by_mask=True), Severity.WARNING),
    ],
)
def test_a_clamp_at_the_edge_of_the_range_is_a_rescue_whatever_it_returns(
    trace: TraceBuilder, severity: Severity
) -> None:
    """So is a `where` whose condition asks for finite values."""
    finding = only(trace)
    assert (finding.id, finding.severity) == ("silent-rescue", severity)


def test_an_overflow_that_leaves_wrong_values_behind_is_an_error() -> None:
    """Inside a norm it has a name of its own."""
    assert only(absorbed("aten.reciprocal.default")).severity is Severity.ERROR
    norm = only(absorbed("aten.rsqrt.default", squares=True, through=("aten.mean.dim",)))
    assert (norm.id, norm.severity) == ("norm-square-overflow", Severity.ERROR)
    length = only(absorbed("aten.div.Tensor", squares=True, by="aten.linalg_vector_norm.default"))
    assert length.id == "norm-square-overflow"


def test_a_table_that_is_float32_again_is_told_apart() -> None:
    """The dtype was restored and the bits were not."""
    assert "has the dtype float32 again" in only(rotary("float32")).cause
    assert "is bfloat16, so it" in only(rotary()).cause


def test_one_flipped_token_of_many_is_rounding() -> None:
    """0.5 % is the bound, and a single token says nothing."""
    assert diagnose(router(1).build()) == ()
    assert only(router(3)).fqn == "moe.gate"


def test_a_trainer_that_reports_a_ratio_other_than_one_in_its_first_step_is_believed_possible() -> None:
    """Later steps compare two policies that really differ."""
    name = "sampling/importance_sampling_ratio/mean"
    trace = TraceBuilder()
    trace.add(Metric(n=trace.n(), step=2, values={name: 0.9}))
    assert diagnose(trace.build()) == ()
    trace.add(Metric(n=trace.n(), step=1, values={name: 0.97}))
    assert (only(trace).id, only(trace).confidence) == ("logprob-gap", "possible")


def test_a_correction_that_is_not_installed_or_never_called_is_not_applied() -> None:
    """One that rescues hides something."""
    assert only(correction(hits=0)).id == "patch-not-applied"
    assert "the signature has changed" in diagnose(correction(hits=0, installed=False).build())[0].summary
    assert only(correction(hits=5, rescued=7)).id == "silent-rescue"


def test_a_patch_that_was_refused_is_found_where_its_replacement_is_defined() -> None:
    """With what its parameters have in the place of the method's."""
    found = only(refused())
    assert (found.id, found.fqn, found.source) == ("patch-not-applied", "mlp", "lib/patches.py:7")
    assert found.summary == (
        "patch_mlp was to replace MLP.forward but did not: its replacement takes cache, the method does not; "
        "the method takes scale, its replacement does not."
    )
    assert (
        found.evidence[0]
        == "MLP._original_forward keeps the original, and MLP.forward still runs the same code object, m.py:3."
    )
    by = only(refused("lib.make_patch"))
    assert by.evidence[0] == "lib.make_patch was asked to patch MLP.forward and returned False; m.py:3 still runs."


@pytest.mark.parametrize(
    ("trace", "found"),
    [
        (pretrained("float32", "bfloat16", "float16"), True),
        (pretrained("bfloat16", "float16", "float16"), True),
        (pretrained("bfloat16", "bfloat16", None), False),
        (pretrained("float32", "float16", "float16"), False),
        (state_loaded(512), True),
        (state_loaded(0), False),
        (
            seen(
                "state-loaded", casts={"float32->float16": 1000}, became_inf=0, became_zero=1, elements=1000, names=[]
            ),
            False,
        ),
        (moments(became_zero=512), True),
        (moments(became_inf=1), True),
        (moments(became_zero=1), False),
        (
            seen(
                "optimizer-state-cast",
                optimizer="Adam",
                casts={"float32->bfloat16": 64},
                keys=["exp_avg"],
                parameters=1,
                rounded=60,
                compared=64,
            ),
            True,
        ),
        (
            seen("state-loaded", casts={"float32->bfloat16": 9}, became_inf=0, became_zero=0, elements=9, names=[]),
            False,
        ),
    ],
)
def test_loading_is_reported_where_it_loses_something_or_does_not_do_as_asked(trace: TraceBuilder, found: bool) -> None:
    """A cast that was asked for and that the range survives is no finding."""
    assert bool(diagnose(trace.build())) is found


def test_many_zeros_in_float16_gradients_are_unsettled_without_a_scaler() -> None:
    """Once, and not where a scaler is at work."""
    zeros = seen("gradient-zeros", parameters={"enc.weight": {"zeros": 40, "elements": 40}})
    assert is_unsettled(zeros.build())
    zeros.add(ScalerState(n=zeros.n(), step=1, scale=2.0, found_inf=False, skipped=False))
    assert not is_unsettled(zeros.build())


def test_a_stall_says_how_many_parameters_could_be_measured() -> None:
    """Where the others are NaN already, the stall is no statement about them."""
    one = {"wanted": 64, "lost": 64, "dtype": "float16", "absmax": 1.0, "update": 1e-5}
    known = {"optimizer": "SGD", "lr": 1e-3, "checks": 2, "first_step": 1, "wanted": 64, "lost": 64}
    partial = only(seen("updates", **known, parameters={"embed.weight": one}, compared=24, finite=1))
    assert "Measured only where values and gradients are finite: 1 of 24 parameters." in partial.evidence
    assert any(line.endswith("Of the updates of all parameters together 100% are lost.") for line in partial.evidence)
    whole = only(seen("updates", **known, parameters={"embed.weight": one}, compared=24, finite=24))
    assert not any("Measured only" in line for line in whole.evidence)


def test_percent_is_never_in_exponent_form() -> None:
    """Two significant digits; 100% is all of it, and nothing less."""
    assert [percent(x) for x in (1.0, 0.999, 0.095, 0.073, 0.00031, 1e-7, 12.0, 0.0)] == [
        "100%", "more than 99%", "9.5%", "7.3%", "0.031%", "less than 0.01%", "1200%", "0%",
    ]  # fmt: skip


def test_a_parameter_is_named_so_that_no_other_has_the_name() -> None:
    """`net.0` alone is the encoder's and the decoder's."""
    trace = scaled(2, name="encoder.net.0.bias")
    for half in ("encoder", "decoder"):
        trace.sample(f"{half}.net.0", 1.0)
    assert "the gradient of encoder.net.0.bias is flushed to zero" in only(trace).summary


def test_steps_that_the_scaler_skips_are_not_counted_as_made() -> None:
    """The headline of a run that completed says both numbers."""
    trace = TraceBuilder()
    for step, skipped in ((1, True), (2, True), (3, False)):
        trace.add(ScalerState(n=trace.n(), step=step, scale=1024.0, found_inf=skipped, skipped=skipped))
    treatment: Any = SimpleNamespace(
        before=SimpleNamespace(trace=trace.build()), before_summary=SimpleNamespace(steps_planned=0, steps_completed=8)
    )
    assert _done(treatment) == "the script completed after 6 optimizer steps (2 more skipped by the gradient scaler)"


@pytest.mark.parametrize(
    ("used", "severity"), [(None, Severity.WARNING), (4000.0, Severity.WARNING), (15.0, Severity.INFO)]
)
def test_a_table_is_a_note_where_this_run_uses_no_position_at_which_its_rounding_counts(
    used: float | None, severity: Severity
) -> None:
    """What it would be at the last position that the model has is said, and is no failure of this run; a longer text is told again."""
    values = {"name": "rope.freqs", "dtype": "bfloat16", "rounded_to": "bfloat16", "length": 16, "first": 1.0, "last": 1.8e-4,
              "deviation": 0.0046, "angle_error": 1.16, "position": 4096, "read": True}  # fmt: skip
    trace = seen("rotary-table", "rope", **values, used=3.0)
    trace.add(*seen("rotary-table", "rope", **values, used=used).build().all(Observed))
    finding = only(trace)
    assert finding.severity is severity
    assert ("the last of this run" in finding.summary) is (used is not None)
