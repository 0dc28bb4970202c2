"""The overflow detector on traces built by hand."""

from dataclasses import replace

import pytest
from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.diagnosis.window import suspicious_windows
from dtypedoctor.scenario.model import Window
from dtypedoctor.trace.events import Raised, Replay


def overflowing(*, replay_finite: bool = True, dtype: str = "float16") -> TraceBuilder:
    """A product that becomes inf inside `mlp`, is passed on by `mlp.down`, and is NaN after the norm."""
    trace = TraceBuilder()
    trace.sample("mlp.gate", 318.75)
    trace.sample("mlp.up", 333.25)
    product = trace.op("aten.mul.Tensor", "mlp", [tensor(1, 318.75, dtype=dtype), tensor(2, 333.25, dtype=dtype)],
                       [tensor(3, 56256.0, dtype=dtype, inf=2)])  # fmt: skip
    trace.add(Replay(n=trace.n(), of=product.n, how="float32", finite=replay_finite, absmax=77178.0))
    trace.op(
        "aten.mm.default", "mlp.down", [tensor(3, 56256.0, dtype=dtype, inf=2), tensor(4)], [tensor(5, inf=1, nan=3)]
    )
    trace.sample("mlp.down", 6620.0, inf=1, nan=3, dtype=dtype)
    trace.sample("mlp.down", 6620.0, inf=2, dtype=dtype, kind="input")
    trace.sample("norm", 0.0, nan=8, dtype=dtype)
    return trace


def test_the_op_that_made_the_first_inf_is_blamed_and_not_the_modules_that_pass_it_on() -> None:
    """Module, op, source and operands are those of the product; a finite replay makes it proven."""
    (finding,) = diagnose(overflowing().build())
    assert finding.id == "float16-overflow"
    assert finding.confidence is Confidence.PROVEN
    assert (finding.fqn, finding.op, finding.source) == ("mlp", "aten.mul.Tensor", "model.py:7")
    assert any("318.8 and 333.2" in line and "65,504" in line for line in finding.evidence)
    assert any("77,178" in line for line in finding.evidence)


def test_a_sum_that_overflows_inside_of_an_operator_is_not_told_as_its_result() -> None:
    """The float16 result would fit: nobody is told that 1,677 is too much for float16."""
    trace = TraceBuilder()
    loss = trace.op("aten.nll_loss_forward.default", "", [tensor(1, 900.0)], [tensor(2, 0.0, inf=1)])
    trace.add(Replay(n=trace.n(), of=loss.n, how="float32", finite=True, absmax=1677.0))
    (finding,) = diagnose(trace.sample("", 0.0, inf=1, kind="loss").build())
    assert finding.id == "float16-overflow"
    assert "a sum inside of aten.nll_loss_forward.default exceeds float16 max (65,504)" in finding.summary
    assert "although its result would be 1,677" in finding.summary
    assert "needs" not in finding.summary


def test_without_an_op_trace_the_module_above_the_first_bad_input_is_possible() -> None:
    """The watch alone says which module's own code it was, and does not claim more than that."""
    trace = (
        TraceBuilder()
        .sample("mlp.up", 333.25)
        .sample("mlp.down", 6620.0, inf=1)
        .sample("mlp.down", 1.0, inf=2, kind="input")
    )
    (finding,) = diagnose(trace.build())
    assert (finding.fqn, finding.op, finding.confidence) == ("mlp", None, Confidence.POSSIBLE)


def test_a_finite_trace_has_no_findings() -> None:
    """Large but finite values are nobody's fault."""
    assert diagnose(TraceBuilder().sample("mlp.down", 65000.0).build()) == ()


def test_a_deliberate_minus_inf_that_reaches_no_module_output_is_silent() -> None:
    """A mask inside the op trace is not an origin."""
    trace = TraceBuilder()
    trace.op("aten.masked_fill.Scalar", "attention", [tensor(1)], [tensor(2, inf=4)])
    trace.op("aten._softmax.default", "attention", [tensor(2, inf=4)], [tensor(3, 0.5)])
    trace.sample("attention", 0.5)
    assert diagnose(trace.build()) == ()


def test_the_second_look_opens_around_the_first_bad_value() -> None:
    """A bad output is looked for in its call, a bad gradient in its backward pass, a bad parameter in its step."""
    assert suspicious_windows(TraceBuilder().sample("a", 1.0).build()) == ()
    forward = TraceBuilder().sample("a", 1.0, nan=1, call=13, phase="generate").build()
    assert suspicious_windows(forward) == (Window(call=13, until="next-call"),)
    backward = TraceBuilder().sample("a", 1.0, nan=1, call=4, phase="backward", kind="grad_output").build()
    assert suspicious_windows(backward) == (Window(call=4, until="backward"),)
    stepped = TraceBuilder().sample("w", 1.0, nan=1, step=3, phase="optimizer", kind="param").build()
    assert suspicious_windows(stepped) == (Window(step=3, until="optimizer"),)


def test_the_second_look_opens_around_a_refused_op() -> None:
    """An exception about dtypes is looked for in the call that raised it."""
    raised = Raised(n=9, step=2, call=6, phase="forward", type="RuntimeError",
                    message="expected m1 and m2 to have the same dtype, but got: c10::Half != c10::BFloat16", frames=[],
                    modules=[])  # fmt: skip
    assert suspicious_windows(TraceBuilder().add(raised).build()) == (Window(call=6, until="next-call"),)


@pytest.mark.parametrize(
    ("modules", "by_call", "window"),
    [
        ([], False, Window(step=2, until="optimizer", early=True)),
        ([], True, Window(step=1, until="optimizer", early=True)),
        (["head"], False, Window(call=6)),
    ],
    ids=["outside", "outside-without-steps", "inside"],
)
def test_what_is_refused_after_a_backward_pass_is_looked_for_in_the_whole_step(
    modules: list[str], by_call: bool, window: Window
) -> None:
    """The window of a call closes where its backward pass begins, and a script averages its weights after it."""
    trace = TraceBuilder().sample("", 1.0, kind="loss", call=6, step=2)
    raised = Raised(n=trace.n(), step=2, call=6, phase="forward", type="RuntimeError",
                    message="expected dtype c10::BFloat16 for `end` but got dtype float", frames=[], modules=modules)  # fmt: skip
    assert suspicious_windows(replace(trace.add(raised).build(), by_call=by_call)) == (window,)
