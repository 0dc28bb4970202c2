"""Whether a remedy has cured: what speaks against it, and what the trial says besides."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared import OK
from nonfinite_examples import overflow
from silent_examples import absorbed, updates
from traces import TraceBuilder

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.examination.results import Outcome, RunSummary, Trial, not_tried
from dtypedoctor.lab.scenarios.model import Scenario, ScenarioStep, Script
from dtypedoctor.lab.trials.judge import Baselines, judge
from dtypedoctor.plugins import Remedy
from dtypedoctor.report.fixes import cured_sentence
from dtypedoctor.runner.run import Run, WorkerExit
from dtypedoctor.trace.events import Correction, End, Metric, Raised, Resources
from dtypedoctor.trace.model import Trace

CURE, STRICT = remedies()["bfloat16"], remedies()["strict"]
SCENARIO = Scenario.model_validate(
    {
        "name": "case",
        "summary": "A case.",
        "steps": [{"model": {"name": "builtin:llama"}, "workload": {"kind": "sft", "steps": 3}}],
    }
)
BEFORE = RunSummary(label="before", steps_completed=3, steps_planned=3, step_time=0.5, peak_memory=1000)
FOUND = (
    Finding(id="float16-overflow", severity=Severity.ERROR, confidence=Confidence.PROVEN, summary="", cause=""),
    Finding(
        id="norm-promotes-to-float32", severity=Severity.INFO, confidence=Confidence.POSSIBLE, summary="", cause=""
    ),
)


def trained(steps: int = 3, *, step_time: float = 1.0, **first: Any) -> TraceBuilder:
    """A run of so many steps with finite losses; ``first`` changes what the first step reports."""
    trace = TraceBuilder().sample("out", 3.0)
    for step in range(1, steps + 1):
        values = {"loss": 2.0 / step, "step_time": step_time}
        trace.add(Metric(n=trace.n(), step=step, values=values, **(first if step == 1 else {})))
    return trace.add(Resources(seconds=2.0, peak_memory=1500, device="cpu"))


def run(trace: TraceBuilder, *, steps: int = 3, ended: WorkerExit = OK) -> Run:
    """The run of which this is the trace."""
    built = trace.build()
    records = (*built.records[:-1], End(n=trace.n(), outcome="completed", steps_completed=steps))
    return Run(trace=Trace(records=records, samples=built.samples, sites=built.sites), exit=ended, directory=Path("x"))


def tried(trace: TraceBuilder, remedy: Remedy = CURE, *, steps: int = 3, **baselines: Any) -> Trial:
    """The verdict on a remedy whose run left this trace."""
    return judge(
        remedy, SCENARIO, run(trace, steps=steps), Baselines(**({"before": BEFORE, "findings": FOUND} | baselines))
    )


def raised(kind: str, message: str = "no") -> TraceBuilder:
    """A run that ends with an exception."""
    trace = trained(1)
    return trace.add(
        Raised(n=trace.n(), step=2, call=2, phase="forward", type=kind, message=message, frames=[], modules=[])
    )


@pytest.mark.parametrize(
    ("trace", "steps", "said"),
    [
        (raised("RuntimeError", "mat1 and mat2"), 1, "RuntimeError in step 2 (forward): mat1 and mat2"),
        (trained(2), 2, "only 2/3 steps completed"),
        (overflow(), 3, "float16-overflow recurs"),
        (trained(nonfinite=["grad_norm"]), 3, "grad_norm not finite in step 1"),
    ],
    ids=["exception", "steps", "finding", "metric"],
)
def test_what_speaks_against_a_cure_is_said(trace: TraceBuilder, steps: int, said: str) -> None:
    """The plainest objection is the reason."""
    trial = tried(trace, steps=steps)
    assert trial.outcome is Outcome.NOT_FIXED
    assert trial.reason == said


def test_fixed_by_is_said_only_of_a_run_without_findings() -> None:
    """A warning that the run of the fix has, and the failing run had not, is named beside it."""
    trial = tried(updates(), findings=FOUND[:1])
    assert (trial.outcome, trial.remains) == (Outcome.FIXED, ("update-stall",))
    assert trial.reason == "float16-overflow does not recur; found in this run: update-stall (new)"
    assert cured_sentence([trial]) == " It does not recur with bfloat16, but update-stall is found."
    assert cured_sentence([tried(trained())]) == " Fixed by bfloat16."


def test_a_run_that_ends_before_the_failing_one_had_come_so_far_is_not_fixed() -> None:
    """A script may leave early with a fix; nobody planned its steps."""
    script = Scenario(
        name="case", summary="A program.", steps=[ScenarioStep(workload=Script(kind="script", path="train.py"))]
    )
    trial = judge(
        CURE, script, run(trained(1), steps=1), Baselines(before=replace(BEFORE, steps_planned=0), findings=FOUND)
    )
    assert trial.reason == "only 1 of the 3 steps that the run without it completed"


def test_a_fix_that_leaves_the_first_finding_is_none() -> None:
    """A warning that comes first has to be gone."""
    stall = replace(FOUND[0], id="update-stall", severity=Severity.WARNING)
    trial = tried(updates(), findings=(stall, FOUND[0]))
    assert (trial.outcome, trial.reason, trial.remains) == (Outcome.NOT_FIXED, "update-stall recurs", ())


def test_another_error_than_before_is_no_cure_either() -> None:
    """A remedy must not trade one failure for another."""
    other = tried(overflow(dtype="float32", float32=None, finite=False))
    assert (other.outcome, other.reason) == (Outcome.NOT_FIXED, "domain-error occurs")


def test_a_finding_that_is_information_does_not_make_a_fix_fail() -> None:
    """An overflow that an activation saturates is worth knowing; that it is there does not mean that nothing was cured."""
    harmless = absorbed("aten.tanh.default", error=0.0)
    assert [found.severity for found in diagnose(harmless.build())] == [Severity.INFO]
    assert tried(harmless, findings=()).outcome is Outcome.FIXED


def corrected(**state: Any) -> TraceBuilder:
    """A run with a correction in this state at its end."""
    trace = trained()
    known = {"id": "norm-output-cast", "target": "RMSNorm", "installed": True}
    return trace.add(
        Correction(n=trace.n(), **known, proof="code object changed"), Correction(n=trace.n(), **(known | state))
    )


def test_a_correction_that_cannot_be_installed_was_not_tried() -> None:
    """It says nothing about the remedy, whatever the run did."""
    trial = tried(corrected(installed=False, reason="forward has another signature"))
    assert trial.outcome is Outcome.NOT_TRIED
    assert trial.reason == "the correction could not be installed: forward has another signature"
    assert trial.run is None


def test_a_correction_that_finds_nothing_to_correct_does_not_apply() -> None:
    """That is no trouble with installing it."""
    trial = tried(corrected(installed=False, reason="TargetMismatchError: there is nothing to set"))
    assert (trial.outcome, trial.reason) == (Outcome.NOT_TRIED, "it does not apply here: there is nothing to set")


def failed(message: str, frame: str) -> Raised:
    """What a run raised, and the line that computed."""
    frames = ["/x/torch/nn.py:1 forward", f"/x/{frame} sums", "/y/dtypedoctor/instrument/optrace.py:9 see"]
    return Raised(n=5, step=1, call=1, phase="forward", type="RuntimeError", message=message, frames=frames, modules=[])


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("aten.mm.default", "aten.mm.default", "at the same operation, aten.mm.default at lora.py:7,"),
        ("aten.mm.default", "aten.bmm.default", "at another operation, aten.bmm.default at lora.py:7,"),
        (None, "aten.bmm.default", "at the same operation, aten.bmm.default at lora.py:7,"),
        ("aten.mm.default", None, "at the same line, lora.py:7,"),
    ],
)
def test_the_operation_that_raised_is_named_where_it_is_known(before: str | None, after: str | None, said: str) -> None:
    """Two operations of one line are told apart if both are known."""
    raised = failed("mixed", "lora.py:7")
    trial = tried(trained(1).add(replace(raised, op=after)), steps=1, raised=replace(raised, op=before))
    assert trial.reason == f"fails {said} with the same error"


@pytest.mark.parametrize(("hits", "never"), [(0, True), (3, False)])
def test_a_correction_that_nothing_had_called_before_the_same_failure_says_nothing(hits: int, never: bool) -> None:
    """It is still not fixed, and the reason names the correction."""
    trial = tried(corrected(hits=hits).add(failed("mixed", "lora.py:7")), raised=failed("mixed", "lora.py:7"))
    assert (trial.outcome, trial.never_reached) == (Outcome.NOT_FIXED, never)
    assert ("nothing had called norm-output-cast" in trial.reason) is never


def test_a_correction_that_nothing_had_called_before_another_failure_is_not_called_unreached() -> None:
    """Something has changed by it all the same."""
    trial = tried(corrected(hits=0).add(failed("mixed", "lora.py:9")), raised=failed("mixed", "lora.py:7"))
    assert (trial.outcome, trial.never_reached) == (Outcome.NOT_FIXED, False)


def test_what_corrections_have_rescued_is_counted_at_the_end() -> None:
    """The last record of each correction holds its totals; without a correction there is nothing to count."""
    trial = tried(corrected(hits=9, rescued=3, clamped=4))
    assert (trial.rescued_elements, trial.clamped_elements) == (3, 4)
    assert tried(trained()).rescued_elements is None


def test_a_remedy_that_is_not_tried_says_why() -> None:
    """It keeps its name and whether it would have been safe."""
    trial = not_tried(remedies()["autocast-bfloat16"], "not asked for")
    assert (trial.outcome, trial.reason, trial.safe) == (Outcome.NOT_TRIED, "not asked for", False)
    assert trial.run is None
