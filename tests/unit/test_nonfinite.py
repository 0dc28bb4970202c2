"""Where inf and NaN come from, told from traces built by hand."""

from typing import Any

import pytest
from nonfinite_examples import (
    given,
    gradient,
    masked,
    optimizer_step,
    overflow,
    replayed,
    scores,
)
from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.edits import advise
from dtypedoctor.diagnosis.incidents import incidents
from dtypedoctor.diagnosis.nonfinite_origin import is_unsettled
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.trace.events import Observation, Raised, Replay


def only(trace: TraceBuilder) -> Finding:
    (finding,) = diagnose(trace.build())
    return finding


def test_a_domain_error_behind_any_half_precision_is_not_proven_on_its_own_operands() -> None:
    """The op is in float32 and has no finite result there; but what it was given may have been rounded before."""

    def divided(before: str) -> Finding:
        trace = TraceBuilder()
        trace.op("aten.mul.Tensor", "scale", [tensor(1, dtype=before)], [tensor(2, dtype=before)])
        trace.op("aten.add.Tensor", "scale", [tensor(3, dtype="float32")], [tensor(4, dtype="float32")])
        zero = tensor(5, 0.0, dtype="float32")
        op = trace.op(
            "aten.div.Tensor", "norm", [tensor(4, dtype="float32"), zero], [tensor(6, dtype="float32", inf=8)]
        )
        replayed(trace, op.n, None, finite=False)
        return only(trace.sample("norm", 0.0, inf=8, dtype="float32"))

    assert divided("float32").confidence is Confidence.PROVEN
    assert divided("bfloat16").confidence is Confidence.LIKELY


def test_a_replay_that_fits_the_dtype_proves_nothing() -> None:
    """The op overflowed inside; what it would have been is only likely."""
    assert only(overflow(float32=60000.0)).confidence is Confidence.LIKELY


def test_fused_attention_on_the_same_operands_proves_that_the_scores_overflow() -> None:
    """Also where the replay of the product alone would have left it likely."""
    assert only(scores(float32=60000.0)).confidence is Confidence.LIKELY
    finding = only(scores(float32=60000.0, nan_rows=2))
    assert (finding.id, finding.confidence) == ("attention-score-overflow", Confidence.PROVEN)
    assert any("scaled_dot_product_attention are finite, absmax 3.5" in one for one in finding.evidence)


@pytest.mark.parametrize(("reached", "is_scaled"), [(93_000.0, True), (9_841_363.0, False)])
def test_attention_is_advised_what_was_measured_to_be_finite(reached: float, is_scaled: bool) -> None:
    """A query that is scaled before the product helps where the product fits then: here it is scaled by a quarter."""

    def text_for(trace: TraceBuilder) -> str:
        return advise([only(trace)], trace.build(), None, began=0.0, own_files=False)[0][0].text

    text = text_for(scores(float32=reached, nan_rows=2))
    assert "scaled_dot_product_attention`, which is finite on the same operands" in text
    assert ("scale the query before the product, which then reaches 23,250" in text) is is_scaled
    assert text_for(scores()) == "Use bfloat16 in the place of float16."


def test_rows_of_both_kinds_are_counted_and_the_earlier_op_is_blamed() -> None:
    """One of the two failures remains when the other is cured."""
    finding = only(scores(nan_rows=3, unattended=2, exact_finite=False))
    assert finding.id == "attention-score-overflow"
    assert "The softmax makes 3 rows NaN; in 2 of them the mask leaves nothing." in finding.evidence


def test_positive_infinities_before_a_softmax_are_not_called_a_mask() -> None:
    """They were asked for by nobody, so what made NaN of them is to blame."""
    assert only(masked(posinf=1)).id == "domain-error"


@pytest.mark.parametrize(
    ("kind", "message", "found"),
    [("KeyError", "'label'", ()), ("KeyError", "'nan'", ()), ("ValueError", "loss is nan", ("backward-overflow",))],
)
def test_a_step_that_a_program_leaves_before_its_scaler_has_looked_is_nobodys_overflow(
    kind: str, message: str, found: tuple[str, ...]
) -> None:
    """After a skipped step the next one overflows too, and the program dies of something else, or of the value."""
    trace = gradient(scale=2.0**22)
    trace.sample("", 2.0, kind="loss", dtype="float32", step=2, call=2)
    trace.sample("lin", 1.0, inf=1, kind="grad_output", phase="backward", step=2, call=2)
    raised = {"type": kind, "message": message, "frames": [], "modules": []}
    trace.add(Raised(n=trace.n(), step=2, call=2, phase="forward", **raised))
    assert tuple(f.id for f in diagnose(trace.build(outcome="raised"))) == found


def test_a_gradient_that_does_not_fit_at_scale_one_is_found_although_there_is_a_scaler() -> None:
    """2**40 over a scale of 65536 is still more than 65504."""
    finding = only(gradient(scale=65536.0, float32=2.0**40))
    assert finding.id == "backward-overflow"
    assert any("at scale 1" in line for line in finding.evidence)


def test_a_vanished_epsilon_is_quoted() -> None:
    """1e-8 is zero in float16 and proves it; 1e-4 is not, and something else made the zero."""
    assert only(optimizer_step()).confidence is Confidence.PROVEN
    finding = only(optimizer_step(epsilon="0.0001"))
    assert (finding.fqn, finding.confidence) == ("emb", Confidence.LIKELY)


def test_a_mask_buffer_of_minus_inf_is_no_damaged_parameter() -> None:
    """What made NaN of it is looked at instead."""
    assert only(given("buffer", "mask", nan=0, neginf=4)).id == "domain-error"


@pytest.mark.parametrize("masks", [{"inputs": 65504.0, "scalars": []}, {"inputs": 1.0, "scalars": ["-1e9"]}])
def test_a_mask_of_large_numbers_that_leaves_the_range_is_still_a_mask(masks: dict[str, Any]) -> None:
    """The report names the op that made the -inf."""
    trace = TraceBuilder()
    birth = trace.op("aten.add.Tensor", "look", [tensor(1, masks["inputs"]), tensor(2, 64.0)], [tensor(3, num_neginf=8)],
                     scalars=masks["scalars"])  # fmt: skip
    replayed(trace, birth.n, 65568.0)
    trace.op("aten._softmax.default", "look", [tensor(3, num_neginf=8)], [tensor(4, nan=8)])
    finding = only(trace.sample("look", 0.0, nan=8).sample("", 0.0, nan=8))
    assert (finding.id, finding.op) == ("fully-masked-row", "aten._softmax.default")
    assert finding.evidence[0].startswith("aten.add.Tensor at model.py:7 made -inf of finite float16 numbers")


def test_a_mask_that_a_cast_makes_infinite_is_told_by_the_dtype_before_it() -> None:
    """Nothing is added to it, and float16 has no 1e15."""
    trace = TraceBuilder()
    trace.op("aten._to_copy.default", "look", [tensor(1, 1e15, dtype="float32")], [tensor(3, num_neginf=8)])
    trace.op("aten._softmax.default", "look", [tensor(3, num_neginf=8)], [tensor(4, nan=8)])
    finding = only(trace.sample("look", 0.0, nan=8).sample("", 0.0, nan=8))
    assert finding.evidence[0].startswith("aten._to_copy.default at model.py:7 made -inf of finite float32 numbers")
    assert "which a cast has made infinite" in finding.cause


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("-inf", "model.py:3 fills the mask with -inf."),
        ("-1e9", "model.py:3 fills the mask with -1e9, and model.py:4 casts it to float16"),
    ],
)
def test_a_mask_is_told_by_the_line_that_fills_it(value: str, said: str) -> None:
    """And by the cast that makes a finite number infinite; nothing is said of an addition that was not made."""
    trace = TraceBuilder()
    infinite = 4 if value == "-inf" else 0
    filled = tensor(2, 1e9, dtype="float32", num_neginf=infinite)
    trace.op(
        "aten.masked_fill.Scalar", "look", [tensor(1, dtype="float32")], [filled], scalars=[value], source="model.py:3"
    )
    trace.op("aten._to_copy.default", "look", [filled], [tensor(3, num_neginf=4)], source="model.py:4")
    trace.op("aten._softmax.default", "look", [tensor(3, num_neginf=4)], [tensor(4, nan=8)])
    finding = only(trace.sample("look", 0.0, nan=8).sample("", 0.0, nan=8))
    assert said in finding.cause
    assert "smallest finite number of float16" in finding.cause
    assert "added" not in finding.cause


def test_what_is_too_large_is_told_from_what_is_undefined() -> None:
    """The one needs smaller operands, the other another formula."""
    assert "larger than float32 can hold" in only(overflow(dtype="float32", float32=5.2e173)).cause
    assert "not defined" in only(overflow(dtype="float32", float32=None, finite=False)).cause
    assert "rounded to 0" in only(overflow(dtype="bfloat16", float32=None, finite=False)).cause


def test_a_bad_value_matters_where_it_gets_to_a_loss_a_gradient_a_result_or_a_sampler() -> None:
    """And nowhere else."""
    mask = TraceBuilder().sample("mask", 1.0, inf=4).sample("", 3.0)
    assert incidents(mask.build()) == ()
    returned = TraceBuilder().sample("mask", 1.0, inf=4).sample("", 3.0, inf=1)
    assert [i.n for i in incidents(returned.build())] == [1]
    trained = TraceBuilder().sample("mask", 1.0, inf=4).sample("", 3.0, inf=1).sample("", 2.0, kind="loss")
    assert incidents(trained.build()) == ()
    lost = TraceBuilder().sample("mlp", 1.0, inf=4).sample("", 2.0, kind="loss", nan=1)
    assert len(incidents(lost.build())) == 1


@pytest.mark.parametrize(("tests", "then", "matter"), [(True, 0, 0), (False, 0, 1), (True, 1, 2)])
def test_gradients_that_the_program_tests_and_leaves_out_matter_where_they_stay_bad(
    tests: bool, then: int, matter: int
) -> None:
    """Its own loss scaler looks for a scale; weights that had got an inf would make the next gradients bad. It steps no optimizer of torch's."""
    trace = TraceBuilder().sample("w", 0.0, kind="accumulated", phase="backward", inf=3)
    trace.op("aten.abs.default", "", [tensor(1, inf=3, origin="gradient")], [tensor(2, inf=3)], root=-1)
    values = {"what": "guard" if tests else "item", "id": 2, "source": "train.py:3", "value": "inf", "sample": None}
    trace.add(
        Observation(n=trace.n(), step=1, call=1, phase="forward", kind="nonfinite-reached", fqn=None, values=values)
    )
    trace.sample("", 2.0, kind="loss", call=2).sample("w", 3.0, kind="accumulated", phase="backward", call=2, inf=then)
    assert len([one for one in incidents(trace.build()) if one.site.phase == "backward"]) == matter


def test_a_parameter_that_was_fine_in_an_earlier_call_was_written_in_between() -> None:
    """The code before the call is looked at; once it was, nothing more is."""
    trace = TraceBuilder().sample("mid.1", 1.0, call=3)
    operand = tensor(1, 2.0, inf=1, origin="parameter", name="mid.1.bias")
    trace.op("aten.addmm.default", "mid.1", [operand, tensor(8)], [tensor(2, inf=8)], call=4)
    trace.sample("mid.1", 0.0, inf=8, call=4).sample("", 0.0, inf=8, call=4)
    assert is_unsettled(trace.build())
    trace.op("aten.mul.Tensor", "", [tensor(9)], [tensor(10)], call=3, root=-1)
    assert not is_unsettled(trace.build())


def test_a_bad_loss_of_a_program_that_calls_no_module_is_unsettled() -> None:
    """There is no call that could be made again."""
    trace = TraceBuilder().sample("", 1.0, nan=1, kind="loss", call=0, step=3)
    assert is_unsettled(trace.build())


def masked_logits(*later: dict[str, Any]) -> TraceBuilder:
    """A model that returns masked logits: its first call is in the op trace, the ``later`` ones are only measured."""
    trace = TraceBuilder()
    trace.op("aten.masked_fill.Scalar", "", [tensor(1)], [tensor(2, num_neginf=4)], scalars=["-inf"])
    trace.sample("", 9.0, inf=4)
    for call, measured in enumerate(later, start=2):
        trace.sample("", call=call, step=call, **{"absmax": 9.0} | measured)
    return trace


def test_a_mask_that_is_harmless_in_one_call_is_so_in_the_others() -> None:
    """Only the calls with an op trace show where infinities come from, and not every call can have one."""
    assert diagnose(masked_logits({"inf": 5}, {"inf": 6, "shape": [3, 8]}).build()) == ()
    assert not is_unsettled(masked_logits({"inf": 5}, {"inf": 6}).build())


@pytest.mark.parametrize(
    "measured", [{"inf": 4, "nan": 1}, {"inf": 4, "absmax": 60000.0}], ids=["NaN", "near the limit"]
)
def test_what_may_be_more_than_the_mask_is_looked_at(measured: dict[str, Any]) -> None:
    """The same module returns NaN later, or finite values so large that an infinity beside them may have overflowed."""
    assert is_unsettled(masked_logits(measured).build())


def transformed(*, measured: bool) -> Finding:
    """An inverse transform, which cannot be run again, of a spectrum that was measured, or was not."""
    trace = TraceBuilder()
    spectrum = tensor(1, 2.0 if measured else None, dtype="complex64")
    op = trace.op("aten._fft_c2r.default", "fft", [spectrum], [tensor(2, nan=8, dtype="float32")])
    trace.add(Replay(n=trace.n(), of=op.n, how="float64", finite=False, absmax=None, note="not implemented"))
    return only(trace.sample("fft", 0.0, nan=8, dtype="float32"))


def test_operands_that_were_not_measured_are_not_said_to_be_finite() -> None:
    """Neither the cause nor the evidence calls them finite; measured ones are."""
    texts = [transformed(measured=False).cause, *transformed(measured=False).evidence]
    assert not any("finite operands" in text or "are finite" in text for text in texts)
    assert "The operands of aten._fft_c2r.default were not measured (complex64) (float32 max: 3.40282e+38)." in texts
    assert "has finite operands" in transformed(measured=True).cause
