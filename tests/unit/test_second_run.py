"""A second run explains the first one only where it shows the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nonfinite_examples import overflow
from traces import TraceBuilder

from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.runner.run import Run, WorkerExit
from dtypedoctor.scenario.model import Request, Scenario, ScenarioStep, Script
from dtypedoctor.trace.events import Op, Raised, Replay
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.results import Treatment
from dtypedoctor.trials.treatment import Plan, treat

SCENARIO = Scenario(
    name="case",
    summary="A program.",
    deterministic=False,
    steps=[ScenarioStep(workload=Script(kind="script", path="train.py"))],
)


def treated(first: Trace, second: Trace) -> Treatment:
    """What comes of a program whose first run left one trace and whose second run another."""

    def run(label: str, request: Request) -> Run:
        ended = WorkerExit(code=0, timed_out=False, seconds=1.0)
        trace = first if label == "before" else second
        return Run(trace=trace, exit=ended, directory=Path("nowhere"), foreign=True)

    return treat(SCENARIO, run, Plan(certify=False, remedies=False))


def without_ops(trace: Trace) -> Trace:
    """What the watch alone sees of it."""
    return replace(trace, records=tuple(r for r in trace.records if not isinstance(r, (Op, Replay))))


def moved(trace: Trace, **changes: Any) -> Trace:
    """The same, with all its values in another step or call."""
    return replace(trace, samples=tuple(replace(sample, **changes) for sample in trace.samples))


def raising(kind: str, step: int) -> Trace:
    """A run that a mismatch ends."""
    said = "mat1 and mat2 must have the same dtype, but got Float and Half" if kind == "RuntimeError" else "no dtype"
    raised = Raised(
        n=90, step=step, call=step, phase="forward", type=kind, message=said, frames=["a.py:1 f"], modules=["", "head"]
    )
    return TraceBuilder().sample("body", 1.0).add(raised).build(outcome="raised")


def test_a_second_run_that_shows_the_same_proves_what_it_shows() -> None:
    """The op trace of the second run explains the first."""
    found = treated(without_ops(overflow().build()), overflow().build())
    assert found.closer is not None
    assert found.findings[0].confidence is Confidence.PROVEN


def test_ctrl_c_is_nothing_that_a_second_run_has_to_repeat() -> None:
    """The person who stopped the program after its failure is not there again; the op trace explains the failure all the same."""
    stopped = Raised(
        n=90, step=1, call=1, phase="forward", type="KeyboardInterrupt", message="", frames=["a.py:1 f"], modules=[]
    )
    first = without_ops(overflow().add(stopped).build(outcome="raised"))
    found = treated(first, overflow().build())
    assert found.closer is not None
    assert found.findings[0].confidence is Confidence.PROVEN


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (without_ops(overflow().build()), moved(overflow().build(), step=9), "in the second it was finite there"),
        (raising("RuntimeError", 1), raising("RuntimeError", 4), "the second raises RuntimeError in head in step 4"),
        (raising("RuntimeError", 1), raising("ValueError", 1), "the second raises ValueError"),
    ],
    ids=["another step", "another step of an exception", "another exception"],
)
def test_a_second_run_that_goes_another_way_proves_nothing(first: Trace, second: Trace, said: str) -> None:
    """What is said is what the first run saw, never proven, with what the second did instead."""
    found = treated(first, second)
    finding = found.findings[0]
    assert found.closer is None
    assert said in found.no_closer
    assert finding.confidence is not Confidence.PROVEN
    assert finding.step == 1
    assert any("Only the first run shows this" in line for line in finding.evidence)


def training(bad_since: int) -> Trace:
    """Three steps, in which a module and the loss are not finite from one on."""
    story = TraceBuilder()
    for step in (1, 2, 3):
        bad = int(step >= bad_since)
        story.sample("body", 1.0, inf=bad, step=step, call=step).sample(
            "", 1.0, kind="loss", inf=bad, step=step, call=step
        )
    return story.build()


def test_a_second_run_that_is_bad_from_its_beginning_explains_nothing() -> None:
    """It has resumed from what the first has saved: what the first run showed is reported, and that no second confirms it."""
    found = treated(training(3), training(1))
    assert found.closer is None
    assert "was not finite in step 1 already" in found.no_closer
    assert found.findings[0].step == 3
    assert found.findings[0].confidence is not Confidence.PROVEN
