"""When the outputs of a run are too far from those of its float32 reference, and what else a run comes to."""

from pathlib import Path

import pytest
from traces import TraceBuilder

from dtypedoctor.lab.bisect.results import Kind
from dtypedoctor.lab.bisect.symptoms import Tolerance, derive, symptom_of
from dtypedoctor.runner.run import Run, WorkerExit
from dtypedoctor.trace.events import Correction, Metric, ProbeLogProbs, Raised
from dtypedoctor.trace.model import Trace


def outputs(*values: float | None, losses: tuple[float, ...] = (), step: int = 0) -> Trace:
    builder = TraceBuilder().add(ProbeLogProbs(n=1, step=step, values=list(values)))
    for number, loss in enumerate(losses, 1):
        builder.add(Metric(n=1 + number, step=number, values={"loss": loss}))
    return builder.build()


def run_of(trace: Trace, code: int = 0) -> Run:
    """The finished run that left a trace."""
    return Run(trace=trace, exit=WorkerExit(code=code, timed_out=False, seconds=2.5), directory=Path("x"))


def came_to(builder: TraceBuilder | Trace, tolerance: Tolerance | None = None, code: int = 0) -> tuple[Kind, str]:
    found = symptom_of(run_of(builder if isinstance(builder, Trace) else builder.build(), code=code), tolerance)
    assert found.seconds == 2.5
    return found.kind, found.reason


def test_four_times_what_one_unit_in_the_last_place_moves_is_accepted() -> None:
    """The root mean square of (3e-4, 4e-4) is 3.54e-4."""
    exact = outputs(-1.0, -2.0)
    tolerance = derive(run_of(exact), [run_of(outputs(-1.0003, -2.0004)), run_of(outputs(-1.0, -2.0))], sampled=False)
    assert list(tolerance.limits.values()) == [pytest.approx(4 * 3.5355e-4, rel=1e-3)]
    assert tolerance.excess(outputs(-1.001, -2.001)) is None
    kind, reason = came_to(outputs(-1.002, -2.002), tolerance)
    assert (kind, reason) == (Kind.INACCURATE, "log-probabilities after step 0 differ by 0.002, 0.00141 accepted")


def test_a_loss_may_be_as_far_away_as_the_log_probabilities_around_it() -> None:
    """Before and after its step; a step without a moved run has no limit."""
    exact = outputs(-1.0, losses=(2.0,))
    tolerance = derive(run_of(exact), [run_of(outputs(-1.5, losses=(2.0,)))], sampled=False)
    assert set(tolerance.limits.values()) == {2.0}
    assert {name for name, *_ in tolerance.limits} == {"loss", "log-probabilities"}
    assert derive(run_of(exact), [], sampled=False).limits == {}


def test_a_given_limit_stands_for_every_reading() -> None:
    """Whatever was moved; of another workload only the first outputs are compared."""
    tolerance = derive(run_of(outputs(-1.0, losses=(2.0,))), [], sampled=False, given=0.5)
    assert set(tolerance.limits.values()) == {0.5}
    assert tolerance.excess(outputs(-1.0, losses=(2.6,))) is not None
    assert tolerance.of_first_outputs().excess(outputs(-1.0, losses=(2.6,))) is None


def test_a_correction_that_could_not_be_installed_is_the_first_thing_said() -> None:
    """The run says nothing about it then."""
    builder = TraceBuilder().add(
        Correction(n=1, target="all", id="keep-float32", installed=False, reason="no such module")
    )
    builder.sample("a", 1.0, nan=1)
    assert came_to(builder) == (Kind.NOT_INSTALLED, "keep-float32: no such module")


@pytest.mark.parametrize(
    ("inputs", "fqn"),
    [
        ((), "mlp.down"),  # nobody fed it anything bad, and it has no parts
        (("mlp.down",), "mlp::self"),  # its caller did
        (("mlp.down", "mlp"), "::self"),  # who got it, too
    ],
)
def test_the_module_that_made_the_first_bad_value_is_named(inputs: tuple[str, ...], fqn: str) -> None:
    """The measured one, or whoever computed what it was fed with."""
    builder = TraceBuilder().sample("mlp.up", 1.0).sample("mlp.down", 65504.0, nan=1)
    for name in inputs:
        builder.sample(name, 1.0, kind="input", nan=1)
    builder.sample("mlp", 1.0, nan=1)
    run = Run(trace=builder.build(), exit=WorkerExit(code=0, timed_out=False, seconds=0.0), directory=Path("x"))
    found = symptom_of(run)
    assert (found.kind, found.fqn, found.absmax) == (Kind.NOT_FINITE, fqn, 65504.0)


def test_the_peak_is_that_of_the_narrow_dtype_that_came_nearest_to_its_end() -> None:
    """A larger float32 value and a parameter are none."""
    builder = TraceBuilder().sample("a", 6550.4).sample("b", 1e30, dtype="float32").sample("c", 6e4, kind="param")
    run = Run(trace=builder.build(), exit=WorkerExit(code=0, timed_out=False, seconds=0.0), directory=Path("x"))
    found = symptom_of(run)
    assert (found.fqn, found.absmax, found.share) == ("a", 6550.4, pytest.approx(0.1))


def test_an_exception_is_told_with_its_place() -> None:
    """A dtype error is a kind of its own."""
    raised = Raised(
        n=1, step=2, phase="backward", call=3, modules=["mlp"], frames=[], op=None, type="RuntimeError",
        message="expected mat1 and mat2 to have the same dtype, but got: c10::Half != float",
    )  # fmt: skip
    kind, reason = came_to(TraceBuilder().add(raised).build(outcome="raised"), code=1)
    assert kind is Kind.DTYPE_ERROR
    assert reason.startswith("RuntimeError in step 2 (backward): expected mat1")
