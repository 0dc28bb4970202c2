"""What a report claims: its status and its headline follow from what was measured, and say nothing besides."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nonfinite_examples import gradient, masked, optimizer_step, overflow, scores, unread_memory
from traces import TraceBuilder, tensor

from dtypedoctor.cli.reported import exit_code
from dtypedoctor.diagnosis.nonfinite_origin import unexplained
from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.examination.examine import examine
from dtypedoctor.report.build import build_report
from dtypedoctor.report.formats import format_named
from dtypedoctor.report.run_document import public_run
from dtypedoctor.report.run_facts import measured_sentence, status_word
from dtypedoctor.report.to_json import Report, Status
from dtypedoctor.runner.command import Program
from dtypedoctor.runner.run import Run, WorkerExit
from dtypedoctor.trace.events import (
    COMPILED_OUTSIDE,
    END_OF_PROGRAM,
    FAILED_THERE,
    NO_TORCH,
    NOT_HERE,
    WORKED_ELSEWHERE,
    Coverage,
    End,
    Metric,
    NotWatched,
    Observation,
    Raised,
    Root,
    ScalerState,
    TensorNote,
)
from dtypedoctor.trace.model import Cursor, Trace
from dtypedoctor.trace.reader import steps_by_call

SCENARIO = Program(name="case", summary="A program.", path="train.py").described()


def report_on(trace: Trace) -> Report:
    ended = WorkerExit(code=0, timed_out=False, seconds=1.0)
    run = Run(trace=trace, exit=ended, directory=Path("nowhere"), foreign=True)
    return build_report(examine(SCENARIO, run), command="", files={}, next_command="")


def measured(**counts: int) -> TraceBuilder:
    """A run of which so much was measured, all of it finite."""
    return TraceBuilder().sample("head", 1.0).add(Coverage(**counts))


@pytest.mark.parametrize("build", [overflow, unread_memory, masked, scores, gradient, optimizer_step])
def test_no_report_says_finite_or_healthy_of_a_trace_that_is_not(build: Callable[[], TraceBuilder]) -> None:
    """Where a sample is not finite the headline does not say finite, and where it matters the run is not healthy."""
    trace = build().build()
    report = report_on(trace)
    if any(not sample.finite for sample in trace.samples):
        assert "is finite" not in report.headline
    if unexplained(trace) is not None:
        assert report.status is not Status.HEALTHY
        assert exit_code(report) == 10
    if any(finding.severity is not Severity.INFO for finding in report.findings):
        assert report.status is Status.FINDINGS


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"module_calls": 214}, "0 of 214 module calls could be measured."),
        ({"module_calls": 10, "module_calls_measured": 8, "losses": 2, "losses_measured": 2}, "8 of 10 module calls could"),
        ({"operators": 1}, "0 of 1 operator outside of modules could be measured."),
        ({"module_calls": 4, "module_calls_measured": 4, "losses": 3}, "0 of 3 losses could be measured."),
        ({"module_calls": 4, "module_calls_measured": 4, "gradients": 30}, "0 of 30 parameter gradients could be measured."),
    ],
)  # fmt: skip
def test_what_ran_and_was_not_measured_makes_a_run_unknown(counts: dict[str, int], said: str) -> None:
    """A relevant share that is missing is in the headline, with exit 10."""
    report = report_on(measured(**counts).build())
    assert (report.status, status_word(report), exit_code(report)) == (Status.UNKNOWN, "UNKNOWN", 10)
    assert said in report.headline


def test_operators_that_are_sampled_make_a_run_healthy_and_are_stated() -> None:
    """Some of many operators outside of modules are enough; how many is said in every format and in the JSON."""
    report = report_on(
        measured(module_calls=20, module_calls_measured=19, operators=3000, operators_measured=12).build()
    )
    assert (report.status, exit_code(report)) == (Status.HEALTHY, 0)
    assert "everything measured (12 of 3,000 operators outside of modules) is finite" in report.headline
    assert measured_sentence(report) == "Measured: 19 of 20 module calls, 12 of 3,000 operators outside of modules."
    assert '"module_calls": [\n      19,\n      20\n    ]' in format_named("json").render(public_run(report))
    for name in ("md", "html"):
        assert "19 of 20 module calls" in format_named(name).render(public_run(report))


def test_calls_that_were_left_out_on_purpose_are_in_the_headline() -> None:
    """With ``--overhead-budget`` a run may be healthy, but the report counts all calls that ran; none measured is not healthy."""
    report = report_on(measured(module_calls=52, module_calls_measured=52, module_calls_skipped=348).build())
    assert (report.status, exit_code(report)) == (Status.HEALTHY, 0)
    assert report.headline.endswith("everything measured (52 of 400 module calls) is finite.")
    assert measured_sentence(report) == "Measured: 52 of 400 module calls."
    assert report_on(measured(module_calls_skipped=348, losses=2, losses_measured=2).build()).status is Status.UNKNOWN


@pytest.mark.parametrize("seen", [0, 3])
def test_a_run_whose_optimizer_steps_may_be_compiled_says_that_none_were_checked(seen: int) -> None:
    """Finite losses and gradients tell nothing of updates that nobody saw."""
    trace = measured(losses=5, losses_measured=5).add(NotWatched(what=COMPILED_OUTSIDE, why="compiled code")).build()
    records = [replace(one, steps_completed=seen) if isinstance(one, End) else one for one in trace.records]
    report = report_on(replace(trace, records=tuple(records)))
    assert report.status is Status.HEALTHY
    assert ("Not checked: optimizer steps inside of compiled functions." in report.headline) is (seen == 0)


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ((), "no nn.Module ran in this process."),
        ((NotWatched(what="tensors and modules", why=NO_TORCH),), "this process did not import torch."),
        (
            (NotWatched(what="2 spawned process(es)", why=NOT_HERE),),
            "no nn.Module ran in this process; 2 spawned process(es) not measured.",
        ),
    ],
)
def test_a_run_of_which_nothing_was_measured_says_so(notes: tuple[NotWatched, ...], said: str) -> None:
    """It is not healthy, and the headline says what did run elsewhere."""
    report = report_on(TraceBuilder().add(*notes, Coverage()).build())
    assert (status_word(report), report.headline, exit_code(report)) == ("NOTHING MEASURED", said, 10)


@pytest.mark.parametrize("readable", [0, 1])
def test_a_trace_of_which_nothing_is_readable_measures_nothing(readable: int) -> None:
    """Random bytes, with or without the first line of a trace before them, are not called finite."""
    whole = TraceBuilder().build()
    damage = ("11 unreadable line(s): 1, 2",)
    damaged = replace(whole, records=whole.records[:readable], samples=(), sites={}, damage=damage)
    report = report_on(damaged)
    assert status_word(report) == "NOTHING MEASURED"
    assert report.headline == "The trace cannot be read: 11 unreadable line(s): 1, 2."
    assert exit_code(report) == (10 if readable else 3)


def test_an_empty_trace_says_nothing_of_modules() -> None:
    """What ran before the first record is not known."""
    report = report_on(replace(TraceBuilder().build(), records=(), samples=(), sites={}))
    assert (status_word(report), report.headline) == ("NOTHING MEASURED", "The trace holds no record.")


def test_a_loss_that_is_nan_without_a_sample_is_not_healthy() -> None:
    """A training that reports a NaN loss itself is not called healthy where no measured tensor shows it."""
    report = report_on(
        measured(module_calls=1, module_calls_measured=1)
        .add(Metric(n=50, step=7, values={}, nonfinite=["loss"]))
        .build()
    )
    assert report.status is Status.UNKNOWN
    assert report.headline == "The loss in step 7 is not finite, and no rule explains it."


def test_a_gradient_of_a_step_that_the_scaler_skipped_is_explained_by_it() -> None:
    """How a loss scale finds its size, and no value that no rule explains."""
    trace = measured(module_calls=1, module_calls_measured=1).sample("head", 1.0, inf=1, kind="grad", phase="backward")
    scaled = [ScalerState(n=60 + i, step=1 + i, scale=2.0**16, found_inf=not i, skipped=not i) for i in range(3)]
    report = report_on(trace.add(*scaled).build())
    assert report.status is Status.HEALTHY
    assert "is in a step that the gradient scaler skipped" in report.headline


def test_work_in_processes_that_nobody_measures_makes_a_run_unknown() -> None:
    """What was measured in the script's own process says nothing of it."""
    counts = {"module_calls": 4, "module_calls_measured": 4}
    for why, status in ((WORKED_ELSEWHERE, Status.UNKNOWN), (NOT_HERE, Status.HEALTHY)):
        report = report_on(measured(**counts).add(NotWatched(what="other programs", why=why)).build())
        assert report.status is status


def test_a_run_whose_last_readings_are_lost_is_unknown() -> None:
    """A GPU that has stopped after the host was through, with status 0, owes what it computed last."""
    counts = {"module_calls": 4, "module_calls_measured": 4}
    lost = NotWatched(what=END_OF_PROGRAM, why=f"{FAILED_THERE} with AcceleratorError: CUDA error: an illegal address")
    report = report_on(measured(**counts).add(lost).build())
    assert (report.status, exit_code(report)) == (Status.UNKNOWN, 10)
    assert "what was computed last could not be read" in report.headline
    assert "an illegal address" in report.headline


def test_gradients_of_zeros_that_nobody_has_looked_at_again_make_a_run_unknown() -> None:
    """Float16 may have flushed them to zero, which only a second run can tell; with a loss scaler there is no doubt."""
    zeros = Observation(n=60, step=2, call=2, phase="backward", kind="gradient-zeros", fqn=None,
                        values={"parameters": {"a.weight": {"zeros": 9, "elements": 9}}})  # fmt: skip
    scaler = ScalerState(n=61, step=2, scale=1024.0, found_inf=False, skipped=False)
    counts = Coverage(module_calls=4, module_calls_measured=4)
    doubtful = report_on(TraceBuilder().sample("head", 1.0).add(zeros, counts).build())
    assert (doubtful.status, exit_code(doubtful)) == (Status.UNKNOWN, 10)
    assert "a.weight is zero in step 2 and there is no loss scaler" in doubtful.headline
    scaled = report_on(TraceBuilder().sample("head", 1.0).add(zeros, scaler, counts).build())
    assert scaled.status is Status.HEALTHY


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        ((1.0, 0.0, 0.0), "every gradient is exactly 0 from step 2 on"),
        ((0.0, 0.0), "every gradient is exactly 0."),
        ((1.0, 0.0, 0.5), ""),
    ],
)
def test_a_run_that_has_no_gradient_any_more_says_since_when(gradients: tuple[float, ...], said: str) -> None:
    """All of them were measured, and are finite; that nothing is learned is for the reader to know, also where that holds from the start."""
    trace = TraceBuilder().sample("head", 1.0)
    for step, size in enumerate(gradients, 1):
        trace.sample("head.weight", size, kind="grad", phase="backward", step=step)
    report = report_on(trace.build())
    assert said in report.headline, report.headline
    assert bool(said) is ("exactly 0" in report.headline)


@pytest.mark.parametrize(("steps", "moved", "said"), [(6, [0, 0], True), (6, [0, 3], False), (2, [0, 0], False)])
def test_a_run_whose_optimizer_moves_nothing_says_so(steps: int, moved: list[int], said: bool) -> None:
    """For whatever reason: gradients of copies, a learning rate of 0; two steps may be a warm-up."""
    values = {"steps": steps, "names": ["a", "b"], "dtypes": ["float32"] * 2, "sampled": [8, 2], "moved": moved,
              "distance": [0.0, 0.0], "norm": [1.0, 1.0]}  # fmt: skip
    ends = Observation(n=60, step=7, call=7, phase="optimizer", kind="parameter-ends", fqn=None, values=values)
    report = report_on(TraceBuilder().sample("head", 1.0).add(ends).build())
    assert (
        f"none of 10 elements of parameters that are followed has changed in {steps} steps" in report.headline
    ) is said


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((2.0, 1.0, 0.5, 0.4, 0.3, 5000.0), "the loss jumps to 5e+03 in step 6, from at most 2."),
        ((9.0, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 8.0), ""),
        ((1.0, 4000.0, 1.0, 4000.0, 1.0, 4000.0, 1.0, 4000.0), ""),
        ((0.0, 0.0, 0.0, 0.0, 0.0, 5.0), ""),
        ((1.0, 5000.0), ""),
    ],
)
def test_a_loss_that_jumps_is_in_the_headline(losses: tuple[float, ...], said: str) -> None:
    """Not where it was as large before, nor where losses of several sizes take turns, nor in a warm-up."""
    trace = TraceBuilder().sample("head", 1.0)
    for step, size in enumerate(losses, 1):
        trace.sample(None, size, kind="loss", step=step)
    report = report_on(trace.build())
    assert report.status is Status.HEALTHY
    assert said in report.headline, report.headline
    assert bool(said) is ("jumps" in report.headline)


def test_a_loss_that_a_scaler_multiplies_is_compared_without_its_scale() -> None:
    """A second phase with a scaler does not begin with a loss that is a million times as large."""
    trace = TraceBuilder().sample("head", 1.0)
    for step, scale in enumerate((1.0,) * 8 + (2.0**20, 2.0**19), 1):
        trace.sample(None, 2.0 * scale, kind="loss", step=min(step, 9))
        if scale > 1:
            trace.add(ScalerState(n=trace.n(), step=9, scale=scale, found_inf=True, skipped=True))
    assert "jumps" not in report_on(trace.build()).headline


def test_a_mask_is_said_to_reach_nothing() -> None:
    """Infinities that get nowhere leave a run healthy, and the headline names them instead of saying finite."""
    trace = (
        TraceBuilder()
        .sample("mask", 1.0, inf=4)
        .sample("head", 1.0)
        .sample("", 1.0, kind="loss")
        .add(Coverage(module_calls=2, module_calls_measured=2))
        .build()
    )
    report = report_on(trace)
    assert report.status is Status.HEALTHY
    assert "inf or NaN (mask in step 1) reaches no loss" in report.headline


@pytest.mark.parametrize(
    ("absmax", "bad", "dtype", "status"),
    [
        (4.0, {"inf": 8}, "float16", Status.UNKNOWN),
        (4.0, {"inf": 8}, "bfloat16", Status.UNKNOWN),
        (4.0, {"inf": 8, "nan": 1}, "bfloat16", Status.FINDINGS),
        (30000.0, {"inf": 8}, "float16", Status.FINDINGS),
        (4.0, {"inf": 1}, "float16", Status.FINDINGS),
        (0.0, {"inf": 16}, "float16", Status.FINDINGS),
    ],
)
def test_infinities_of_a_sampler_are_no_finding_where_no_op_trace_tells_what_made_them(
    absmax: float, bad: dict[str, int], dtype: str, status: Status
) -> None:
    """Masked scores are -inf; NaN, few infinities or nothing else, and infinities beside numbers near the dtype's maximum are no mask."""
    trace = TraceBuilder().sample("inner", 1.0).sample("", absmax, cls="Sampler", dtype=dtype, **bad)
    report = report_on(trace.add(Coverage(module_calls=2, module_calls_measured=2)).build())
    assert report.status is status, report.headline
    assert exit_code(report) == 10
    if status is Status.UNKNOWN:
        assert report.headline.startswith("Sampler outputs inf and no NaN in step 1 (forward): masked scores look so")


def test_a_trace_without_counts_is_judged_by_its_samples() -> None:
    """Older traces, and those of programs that left without ending them, still are healthy where something was measured."""
    assert report_on(TraceBuilder().sample("head", 1.0).build()).status is Status.HEALTHY
    assert report_on(TraceBuilder().build()).status is Status.UNKNOWN


@pytest.mark.parametrize(("call", "when"), [(1, "step 1"), (301, "call 301")])
def test_a_process_without_an_optimizer_step_is_said_to_have_made_calls(call: int, when: str) -> None:
    """No report says step 301 beside 0 steps; the first call is in the first step anyhow."""
    trace = steps_by_call(ended_at_zero(TraceBuilder().sample("mlp", 1.0, call=call, nan=3).build()))
    report = report_on(trace)
    assert report.before is not None
    assert report.before.steps_completed == 0
    assert when in report.headline
    text = format_named("md").render(public_run(report))
    assert f"forward, {when}" in text
    assert "step 301" not in text
    assert report.findings[0].step == call


def ended_at_zero(trace: Trace) -> Trace:
    """The trace of a process whose optimizer made no step."""
    return replace(
        trace, records=tuple(replace(r, steps_completed=0) if isinstance(r, End) else r for r in trace.records)
    )


def test_nan_that_was_made_outside_of_modules_and_replaced_is_not_called_finite() -> None:
    """A logarithm whose NaN somebody replaces is healthy, but not finite."""
    made = TraceBuilder()
    bad = TensorNote(id=2, dtype="float32", shape=[2], absmax=1.0, num_nan=1)
    made.op("aten.log.default", "", [tensor(1, dtype="float32")], [bad], sentinel=True, root=-1, source="train.py:6")
    made.op("aten.nan_to_num.default", "", [bad], [tensor(3, dtype="float32")], sentinel=True, root=-1)
    report = report_on(made.add(Coverage(operators=2, operators_measured=2)).build())
    assert report.status is Status.HEALTHY
    assert "inf or NaN (`log` at train.py:6) reaches no loss, used gradient or parameter" in report.headline


@pytest.mark.parametrize(
    ("scalars", "given", "says"),
    [
        (["-inf"], 0, "is finite but inf or NaN that the code asks for (`masked_fill` at model.py:7)"),
        (
            ["-inf"],
            1,
            "inf or NaN (`masked_fill` at model.py:7) reaches no loss, used gradient or parameter, and no",
        ),
        (["0.5"], 0, "inf or NaN (`masked_fill` at model.py:7) reaches no loss"),
    ],
    ids=["a mask", "data", "computed"],
)
def test_everything_is_finite_only_where_no_record_holds_inf(scalars: list[str], given: int, says: str) -> None:
    """A mask is named as one; what comes in with the data, and what was computed, is named as unexplained."""
    trace = TraceBuilder()
    operands, results = [tensor(1, inf=given)], [tensor(2, inf=3)]
    trace.op("aten.masked_fill.Scalar", "", operands, results, sentinel=True, root=-1, scalars=scalars)
    trace.op("aten._softmax.default", "", results, [tensor(3)], sentinel=True, root=-1)
    report = report_on(trace.add(Coverage(operators=2, operators_measured=2)).build())
    assert report.status is Status.HEALTHY
    assert says in report.headline


@pytest.mark.parametrize(
    ("before", "skipped", "status"),
    [(1.0, False, Status.UNKNOWN), (None, False, Status.HEALTHY), (1.0, True, Status.HEALTHY)],
    ids=["finite before", "infinite from the beginning", "in a step that is skipped"],
)
def test_an_output_that_overflows_in_training_and_reaches_no_loss_is_not_called_healthy(
    before: float | None, skipped: bool, status: Status
) -> None:
    """A mask is infinite from the beginning; what becomes infinite has been replaced by something, and by what was not measured."""
    trace = TraceBuilder()
    if before is not None:
        trace.sample("mlp", before, step=1)
    trace.sample("mlp", 60_000.0, inf=3, step=2, call=2).sample("", 2.0, dtype="float32", kind="loss", step=2, call=2)
    trace.sample("", 2.0, dtype="float32", kind="loss", step=3, call=3)
    trace.add(ScalerState(n=trace.n(), step=2, scale=1024.0, found_inf=skipped, skipped=skipped))
    report = report_on(trace.build())
    assert report.status is status
    assert ("overflows float16 and was finite before" in report.headline) is (status is Status.UNKNOWN)


def test_what_a_process_that_was_killed_may_have_lost_is_said_as_of_the_module_that_it_entered_last() -> None:
    """How many calls and gradients there were is not known then."""
    builder = TraceBuilder().sample("a", 1.0)
    cursor = Cursor(n=builder.n(), step=1, call=1, site=builder.build().sites[1])
    whole = builder.build()
    trace = replace(whole, cursor=cursor, records=tuple(r for r in whole.records if not isinstance(r, End)))
    ended = WorkerExit(code=-15, timed_out=False, seconds=1.0)
    run = Run(trace=trace, exit=ended, directory=Path("nowhere"), foreign=True)
    report = build_report(examine(SCENARIO, run), command="", files={}, next_command="")
    (gap,) = [gap for gap in report.coverage if gap.startswith("the end of the run")]
    assert gap.endswith(
        "1 measurement up to step 1 could be read; the module entered last was a (in a model of no tensor) in step 1 (forward): "
        "its work and what followed may be missing"
    )
    assert " of " not in measured_sentence(report)
    assert measured_sentence(report).endswith("; how many ran is not known.")


@pytest.mark.parametrize(
    ("entered", "modules", "when"),
    [(3, [], "after step 3"), (4, [], "in step 4 (forward)"), (3, ["a"], "in step 4 (forward)")],
    ids=["no call since", "called since", "in a module"],
)
def test_an_exception_after_a_step_is_in_the_next_one_only_if_that_has_begun(
    entered: int, modules: list[str], when: str
) -> None:
    """An optimizer's step ends one; what the program does then, without a call of a module, belongs to none."""
    builder = TraceBuilder().sample("a", 1.0, step=3, call=3)
    raised = Raised(n=builder.n(), step=4, call=entered, phase="forward", type="KeyError", message="'x'",
                    frames=["/home/me/train.py:12 main"], modules=modules)  # fmt: skip
    builder.add(Root(root=0, cls="Model", modules=1, dtypes={}))
    whole = builder.add(raised).build(outcome="raised")
    trace = replace(whole, cursor=Cursor(n=1, step=entered, call=entered, site=whole.sites[1]))
    assert trace.when(raised) == when
    assert f"KeyError {when}: 'x'" in report_on(trace).headline
