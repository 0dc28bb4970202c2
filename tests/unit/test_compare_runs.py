"""Two runs, compared."""

from dataclasses import replace

import pytest
from compared import OK, compared, saved, three_modules
from hypothesis import given
from hypothesis import strategies as st
from traces import TraceBuilder

from dtypedoctor.lab.compare.comparison import Difference, Verdict
from dtypedoctor.trace.events import Environment, Metric, Observed, ProbeLogProbs, Raised, Resources
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ParameterEnds


def test_the_first_difference_in_execution_order_is_named() -> None:
    """layers.1 drifts first; the model after it only follows."""
    found = compared(three_modules().build(), three_modules(scale=1.5).build())
    assert found.verdict is Verdict.DIVERGED
    assert found.first is not None
    assert (found.first.fqn, found.first.difference, found.first.pairs_before) == ("layers.1", Difference.MAGNITUDE, 1)
    assert found.first.error == pytest.approx(1 / 3)
    assert [module.first_beyond for module in found.modules] == [None, 1, 2]


def test_of_two_calls_that_one_run_makes_besides_the_earlier_is_named() -> None:
    """Both runs have all modules; one calls two of them once more, each before something that both do afterwards."""
    a, b = TraceBuilder(), TraceBuilder()
    for trace, more in ((a, True), (b, False)):
        trace.sample("one", 1.0).sample("two", 1.0)
        for name in ("one", "two"):
            if more:
                trace.sample(name, 1.0)
            trace.sample("last", 1.0)
    found = compared(a.build(), b.build())
    assert found.first is not None
    assert found.first.fqn == "one"


def test_what_only_one_run_has_lies_after_the_end_only_where_all_of_it_does() -> None:
    """A module before the last thing that both measure is missing in the middle."""
    b = TraceBuilder().sample("one", 1.0).sample("last", 1.0).build()
    middle = TraceBuilder().sample("one", 1.0).sample("more", 1.0).sample("last", 1.0).sample("more", 1.0).build()
    after = TraceBuilder().sample("one", 1.0).sample("last", 1.0).sample("more", 1.0).build()
    assert [(one.fqn, one.only_in, one.after_the_end) for one in compared(middle, b).missing] == [("more", "A", False)]
    assert [(one.fqn, one.only_in, one.after_the_end) for one in compared(b, after).missing] == [("more", "B", True)]


def trained(*, error: float, step: int = 1, bias: float = 1e-9) -> TraceBuilder:
    """A deep float32 model of wide layers in training step ``step``; ``error`` is that of a gradient."""
    trace = TraceBuilder()
    for number in range(32):
        trace.sample(f"layers.{number}", 2.0, dtype="float32", shape=[2, 64, 256], step=step)
    trace.sample("k.weight", 0.25 * (1 + error), dtype="float32", kind="grad", phase="backward", step=step)
    return trace.sample("k.bias", bias, dtype="float32", kind="grad", phase="backward", step=step)


def test_an_output_that_only_one_run_has_is_told_apart_from_a_missing_module() -> None:
    """Eager attention returns its weights as a second output, sdpa does not: that is told, and the runs are equal."""
    eager = three_modules().sample("layers.1", 0.5, index="1").build()
    found = compared(three_modules().build(), eager)
    assert found.verdict is Verdict.EQUAL
    (one,) = found.missing
    assert (one.only_in, one.fqn, one.path, one.whole, one.extra) == ("B", "layers.1", "1", False, True)


def test_an_additional_call_in_the_middle_is_where_the_runs_part() -> None:
    """B generates one token more before both go on."""
    a = TraceBuilder().sample("head", 1.0, phase="generate").sample("head", 1.0).build()
    b = TraceBuilder()
    b.sample("head", 1.0, phase="generate").sample("head", 1.0, phase="generate").sample("head", 1.0)
    found = compared(a, b.build())
    assert found.verdict is Verdict.DIVERGED
    assert found.first is not None
    assert (found.first.difference, found.first.lane, found.first.nth) == (Difference.ONLY_B, "generate", 2)
    assert (found.first.pairs_before, found.lone_b) == (1, 1)


def with_metrics(*values: float | None, step_time: float = 1.0, **names: float) -> Trace:
    """A run that reports a loss per step; None is one that is not finite."""
    trace = three_modules()
    for step, value in enumerate(values, start=1):
        finite = {"loss": value} if value is not None else {}
        trace.add(
            Metric(
                n=trace.n(),
                step=step,
                values=finite | names | {"step_time": step_time},
                nonfinite=[] if value is not None else ["loss"],
            )
        )
    return trace.build()


def test_a_nan_loss_equals_a_nan_loss_and_no_other() -> None:
    """Both not finite is equal; one not finite is as far apart as can be."""
    assert compared(with_metrics(None), with_metrics(None)).verdict is Verdict.EQUAL
    (loss,) = compared(with_metrics(None), with_metrics(2.0)).metrics
    assert (loss.beyond, loss.max_error, loss.a, loss.b) == ((1,), 1.0, (None,), (2.0,))


def with_logprobs(*values: float | None) -> Trace:
    """A run with one probe."""
    trace = three_modules()
    return trace.add(ProbeLogProbs(n=trace.n(), step=1, values=list(values))).build()


def test_differing_versions_devices_and_settings_are_listed() -> None:
    """What explains a divergence stands beside it; the scenario's name does not change a run."""
    a = three_modules().add(Environment(values={"device": "cpu", "versions": {"torch": "2.11"}})).build()
    b = (
        three_modules()
        .add(Environment(values={"device": "cuda", "versions": {"torch": "2.11", "triton": "3"}}))
        .build()
    )
    steps = [{"model": {"dtype": "float16", "targets": ["a", "b"]}}]
    other = [{"model": {"dtype": "bfloat16", "targets": ["a", "b"]}}]
    found = compared(saved(a, name="one", steps=steps), saved(b, name="two", steps=other))
    assert [(s.name, s.a, s.b) for s in found.environment] == [
        ("device", "cpu", "cuda"),
        ("versions.triton", None, "3"),
    ]
    assert [(s.name, s.a, s.b) for s in found.settings] == [("steps.0.model.dtype", "float16", "bfloat16")]


def test_a_killed_run_and_one_that_was_stopped_ended_differently() -> None:
    """Both traces are cut short, but for different reasons."""
    whole = three_modules().build()
    cut = replace(whole, records=whole.records[:-1])
    found = compared(saved(cut, exit=replace(OK, code=-9)), saved(cut, exit=replace(OK, timed_out=True)))
    assert found.ends_differ
    assert "SIGKILL" in found.a.ended


measurements = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "a.c"]),
        st.sampled_from(["forward", "generate"]),
        st.integers(1, 2),
        st.floats(0, 1e4, allow_nan=False),
    ),
    max_size=12,
)


def built(rows: list[tuple[str, str, int, float]]) -> Trace:
    """A trace with these measurements, in order of their steps."""
    trace = TraceBuilder()
    for fqn, phase, step, absmax in sorted(rows, key=lambda row: row[2]):
        trace.sample(fqn, absmax, phase=phase, step=step)
    return trace.build()


@given(measurements, measurements)
def test_every_measurement_is_accounted_for_and_the_sides_can_be_swapped(
    rows_a: list[tuple[str, str, int, float]], rows_b: list[tuple[str, str, int, float]]
) -> None:
    """What is compared and what is alone add up to what was measured, and A against B says what B against A says."""
    a, b = built(rows_a), built(rows_b)
    one, other = compared(a, b), compared(b, a)
    assert one.compared + one.lone_a == len(a.samples)
    assert one.compared + one.lone_b == len(b.samples)
    assert sum(m.compared + m.only_a + m.only_b for m in one.modules) == one.compared + one.lone_a + one.lone_b
    assert (one.verdict, one.compared, one.beyond, one.lone_a) == (
        other.verdict,
        other.compared,
        other.beyond,
        other.lone_b,
    )
    assert (one.verdict is Verdict.EQUAL) == (bool(rows_a) and not one.lone_a and not one.lone_b and not one.beyond)


def taught(*, moved: int, distance: float, dtype: str = "float32") -> Trace:
    """A run of 100 steps that has moved ``moved`` of 64 elements of one parameter; its outputs are those of any other."""
    ends = ParameterEnds(
        steps=100, names=["w"], dtypes=[dtype], sampled=[64], moved=[moved], distance=[distance], norm=[1.0]
    )
    trace = three_modules(dtype=dtype)
    return trace.add(Observed(n=trace.n(), step=100, call=1, phase="optimizer", what=ends)).build()


@pytest.mark.parametrize(
    ("moved", "distance", "stands_still", "verdict"),
    [
        (2, 1e-5, "B", Verdict.DIVERGED),
        (0, 0.0, "B", Verdict.DIVERGED),
        (20, 1.2e-2, "", Verdict.EQUAL),
        (64, 1.1e-2, "", Verdict.EQUAL),
        (64, 0.4, "", Verdict.DIVERGED),
    ],
)
def test_runs_that_train_a_parameter_elsewhere_have_diverged(
    moved: int, distance: float, stands_still: str, verdict: Verdict
) -> None:
    """A bfloat16 run whose weights stand still is not equal to one that trains them; one that rounds at random, or coarsely, is."""
    exact, coarse = taught(moved=64, distance=1e-2), taught(moved=moved, distance=distance, dtype="bfloat16")
    comparison = compared(exact, coarse, None)
    assert comparison.verdict is verdict
    assert [parameter.stands_still for parameter in comparison.parameters] == [stands_still]


def test_two_runs_that_share_less_than_half_of_the_digits_do_not_agree_after_many_steps() -> None:
    """The tolerance grows with the steps up to the square root of the coarsest dtype's epsilon."""
    comparison = compared(trained(error=0.0, step=999).build(), trained(error=1e-3, step=999).build(), None)
    assert comparison.verdict is Verdict.DIVERGED
    assert comparison.tolerance_at(10**6) == pytest.approx(2.0**-11.5)


def ended(checksum: str = "", *, raised: bool = False) -> TraceBuilder:
    """A run with a checksum of its parameters, or that an exception has ended."""
    trace = three_modules()
    if raised:
        trace.add(
            Raised(n=99, step=1, call=1, phase="forward", type="RuntimeError", message="no", frames=[], modules=[])
        )
    return trace.add(Resources(seconds=1.0, peak_memory=0, device="cpu", checksum=checksum))


def cut(trace: Trace) -> Trace:
    """Without its end."""
    return replace(trace, records=trace.records[:-1])


WHOLE, EMPTY, RAISED = three_modules().build(), TraceBuilder().build(), ended(raised=True).build(outcome="raised")
DAMAGED = replace(WHOLE, damage=("1 unreadable line(s): 7",))
LONGER = three_modules().sample("layers.0", 2.0, step=2).build()
TWO_MODELS, ALIKE = (
    TraceBuilder().sample("head", 1.0, root=0).sample("head", second, root=1).build() for second in (5.0, 1.0)
)


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "verdict"),
    [
        pytest.param(three_modules(nan=3, inf=2).build(), three_modules(nan=3, inf=2).build(), 0.0, "EQUAL", id="as many NaN and inf"),
        pytest.param(three_modules(shape=[2, -1]).build(), three_modules(shape=[2, 9]).build(), 0.01, "EQUAL", id="a size that was not kept"),
        pytest.param(three_modules(shape=[2, 8]).build(), three_modules(shape=[2, 9]).build(), 0.01, "DIVERGED", id="other shapes of one magnitude"),
        pytest.param(three_modules(inf=8).build(), WHOLE, 0.01, "DIVERGED", id="inf in one run only"),
        pytest.param(TWO_MODELS, TWO_MODELS, 0.0, "EQUAL", id="two models with modules of one name"),
        pytest.param(TWO_MODELS, ALIKE, 0.01, "DIVERGED", id="the second of two models differs"),
        pytest.param(trained(error=0.0).build(), trained(error=2e-6).build(), None, "EQUAL", id="sums in another order"),
        pytest.param(trained(error=0.0).build(), trained(error=1e-4).build(), None, "DIVERGED", id="more than rounding can do in a step"),
        pytest.param(trained(error=0.0, step=9).build(), trained(error=1e-4, step=9).build(), None, "EQUAL", id="rounding of nine steps"),
        pytest.param(trained(error=0.0, step=9).build(), trained(error=1e-2, step=9).build(), None, "DIVERGED", id="more than rounding in nine steps"),
        pytest.param(trained(error=0.0).build(), trained(error=0.0, bias=3e-9).build(), None, "EQUAL", id="a gradient that is all rounding"),
        pytest.param(trained(error=0.0).build(), trained(error=0.0, bias=3e-3).build(), None, "DIVERGED", id="a small gradient that differs"),
        pytest.param(with_metrics(1e-8), with_metrics(3e-8), 0.01, "EQUAL", id="losses that cancel to nothing"),
        pytest.param(with_metrics(1e-8), with_metrics(3e-8), 0.0, "DIVERGED", id="losses that cancel and every digit counts"),
        pytest.param(with_metrics(None), with_metrics(None), 0.01, "EQUAL", id="both losses are NaN"),
        pytest.param(with_logprobs(-1.0, None), with_logprobs(-1.0, None), 0.01, "EQUAL", id="a token without a finite value in both"),
        pytest.param(with_logprobs(-1.0, None), with_logprobs(-1.0, -2.0), 0.01, "DIVERGED", id="a token without a finite value in one"),
        pytest.param(ended("aa").build(), ended("ab").build(), 0.0, "DIVERGED", id="parameters that differ by a bit"),
        pytest.param(ended("aa").build(), ended("aa").build(), 0.0, "EQUAL", id="the same parameters"),
        pytest.param(EMPTY, EMPTY, 0.01, "INCOMPLETE", id="two empty traces"),
        pytest.param(EMPTY, WHOLE, 0.01, "INCOMPLETE", id="one empty trace"),
        pytest.param(cut(WHOLE), cut(WHOLE), 0.01, "INCOMPLETE", id="two traces without an end"),
        pytest.param(DAMAGED, WHOLE, 0.01, "INCOMPLETE", id="lines that could not be read"),
        pytest.param(WHOLE, LONGER, 0.01, "INCOMPLETE", id="one run goes on longer"),
        pytest.param(RAISED, RAISED, 0.01, "EQUAL", id="two runs that fail alike"),
        pytest.param(RAISED, WHOLE, 0.01, "DIVERGED", id="an exception in one run only"),
        pytest.param(cut(WHOLE), WHOLE, 0.01, "DIVERGED", id="one run was cut short"),
    ],
)  # fmt: skip
def test_two_runs_are_equal_diverged_or_not_to_be_compared(
    a: Trace, b: Trace, tolerance: float | None, verdict: str
) -> None:
    """The verdict does not depend on which of them comes first."""
    assert compared(a, b, tolerance).verdict is compared(b, a, tolerance).verdict is Verdict[verdict]
