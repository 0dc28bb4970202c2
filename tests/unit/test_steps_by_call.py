"""Steps in traces of processes without an optimizer."""

from dataclasses import replace

from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.nonfinite_origin import is_unsettled
from dtypedoctor.trace.events import End, Op, Replay
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import steps_by_call


def evaluation(steps_completed: int = 0, kind: str = "output") -> Trace:
    """A trace of three outermost calls, all in step 1, and an op in the last."""
    builder = TraceBuilder()
    for call in (1, 2, 3):
        builder.sample("net", 1.0, call=call, kind=kind)
    builder.op("aten.mul.Tensor", "net", [tensor(1)], [tensor(2)], call=3)
    trace = builder.build()
    records = tuple(replace(r, steps_completed=steps_completed) if isinstance(r, End) else r for r in trace.records)
    return replace(trace, records=records)


def test_without_optimizer_steps_each_outermost_call_is_a_step() -> None:
    """Samples and ops carry the number of their call."""
    trace = steps_by_call(evaluation())
    assert [sample.step for sample in trace.samples] == [1, 2, 3]
    assert [op.step for op in trace.all(Op)] == [3]


def test_one_optimizer_step_keeps_the_steps_as_they_are() -> None:
    """Whether the end says so, or a parameter that was measured after a step."""
    for trace in (evaluation(steps_completed=1), evaluation(kind="param")):
        assert steps_by_call(trace) is trace


def test_a_gradient_is_followed_into_the_modules_that_were_called_after() -> None:
    """The backward pass through all calls is in the last of them; a gradient bears the number of its own call."""
    builder = TraceBuilder()
    for call in (1, 2, 3):
        builder.sample("", 1.0, call=call, root=call)
    made = builder.op(
        "aten.mm.default", "", [tensor(1), tensor(2)], [tensor(3, inf=4)], call=3, phase="backward", source="train.py:9"
    )
    builder.add(Replay(n=builder.n(), of=made.n, how="float32", finite=True, absmax=140_000.0, dtype="float32"))
    again = {"phase": "backward", "call": 3}  # a tensor that is transposed twice is the first one again
    builder.op("aten.t.default", "", [tensor(3, inf=4)], [tensor(4, inf=4)], **again)
    builder.op("aten.t.default", "", [tensor(4, inf=4)], [tensor(3, inf=4)], **again)
    builder.sample("", 5e4, inf=4, kind="grad_output", phase="backward", call=2, root=2)
    trace = builder.build()
    ended = tuple(replace(record, steps_completed=0) if isinstance(record, End) else record for record in trace.records)
    trace = steps_by_call(replace(trace, records=ended))
    (finding,) = diagnose(trace)
    assert (finding.id, finding.op, finding.call, finding.source) == ("backward-overflow", made.op, 3, "train.py:9")
    assert finding.confidence.value == "proven"
    assert not is_unsettled(trace)


def test_what_happens_before_the_first_call_is_in_step_one() -> None:
    """A call number of zero is no step."""
    trace = evaluation()
    early = replace(trace, samples=tuple(replace(sample, call=0) for sample in trace.samples))
    assert {sample.step for sample in steps_by_call(early).samples} == {1}
