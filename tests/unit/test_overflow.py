"""The overflow detector on traces built by hand."""

from dataclasses import replace

import pytest
from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.diagnosis.window import suspicious_windows
from dtypedoctor.scenario.model import Window
from dtypedoctor.trace.events import Raised, Replay


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
