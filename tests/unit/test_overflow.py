"""The overflow detector on traces built by hand."""

from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.trace.events import Replay


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
