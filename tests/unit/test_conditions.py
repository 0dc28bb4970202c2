"""Runs under another condition: when they are proposed, what they say of a failure, and that they are no cures."""

from dataclasses import replace
from typing import Any

import pytest
from nonfinite_examples import overflow
from report_builders import facts_of, plain_text
from traces import TraceBuilder

from dtypedoctor.diagnosis import with_tie_breakers
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.examination.results import Bearing, Diagnostic, Outcome, Trial, not_tried
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.lab.trials.changes import change_of
from dtypedoctor.lab.trials.judge import apply_ablations, diagnostic, without_effect
from dtypedoctor.report.fixes import cured_sentence, cures, remedy_lines
from dtypedoctor.report.to_json import Report, Status
from dtypedoctor.trace.events import Condition, Observation, Raised, ScalerState

SCRIPT = Scenario.model_validate(
    {"name": "case", "summary": "A case.", "steps": [{"workload": {"kind": "script", "path": "train.py"}}]}
)
FOUND = Finding(
    id="float16-overflow",
    severity=Severity.ERROR,
    confidence=Confidence.PROVEN,
    op="aten.mm.default",
    dtype="float16",
    summary="",
    cause="",
    remedies=("bfloat16",),
)


def seen(kind: str, **values: Any) -> Observation:
    """An observation of the first step."""
    return Observation(n=9000, step=1, call=1, phase="forward", kind=kind, values=values)


REGION = seen("autocast-region", device="cpu", wanted="float16", enabled=True, source=None)
GRAPHS = seen("compile", breaks=1, unique_graphs=2, frames=2, frames_compiled=2, recompiles=0, limit_hits=0)
SCALER = ScalerState(n=9000, step=1, scale=65536.0, found_inf=True, skipped=True)


@pytest.mark.parametrize(
    ("finding", "record", "offered"),
    [
        (FOUND, REGION, ("autocast-off",)),
        (FOUND, replace(REGION, values=REGION.values | {"enabled": False}), ()),
        (FOUND, replace(REGION, values=REGION.values | {"wanted": "bfloat16"}), ()),
        (replace(FOUND, id="head-dtype-mismatch", dtype="float32"), REGION, ("autocast-off",)),
        (replace(FOUND, id="nonfinite-input"), REGION, ()),
        (replace(FOUND, id="stale-dequant-buffer"), REGION, ()),
        (FOUND, GRAPHS, ("compile-off",)),
        (FOUND, replace(GRAPHS, values=GRAPHS.values | {"unique_graphs": 0}), ()),
        (replace(FOUND, id="compile-graph-break"), GRAPHS, ()),
        (replace(FOUND, id="backward-overflow"), SCALER, ("loss-scale-one",)),
        (FOUND, SCALER, ()),
        (replace(FOUND, op="aten._scaled_dot_product_flash_attention_for_cpu.default"), SCALER, ("eager-attention",)),
        (replace(FOUND, op="aten._scaled_dot_product_efficient_attention_backward.default"), SCALER,
         ("eager-attention",)),
        (replace(FOUND, op="aten._scaled_dot_product_attention_math.default"), SCALER, ()),
        (replace(FOUND, severity=Severity.INFO), REGION, ()),
    ],
)  # fmt: skip
def test_a_condition_is_proposed_where_it_settles_something(
    finding: Finding, record: Observation | ScalerState, offered: tuple[str, ...]
) -> None:
    """Behind what may cure, and nowhere else."""
    assert with_tie_breakers(finding, TraceBuilder().add(record).build()).remedies == ("bfloat16", *offered)


def under(*states: Condition, failing: bool = False) -> TraceBuilder:
    return (overflow() if failing else TraceBuilder().sample("out", 3.0)).add(*states)


def state(effects: int, reason: str = "") -> Condition:
    """A state of autocast-off."""
    return Condition(n=9000, id="autocast-off", effects=effects, reason=reason)


def test_a_condition_that_made_no_difference_was_not_tried() -> None:
    """It says why; a process that died before is another matter; a run that was not to have it is none."""
    off = change_of(remedies()["autocast-off"])(SCRIPT)
    assert (
        without_effect("autocast-off", off, under(state(0, "no region")).build()) == "it never took effect: no region"
    )
    assert without_effect("autocast-off", off, under().build()) == "it never took effect before the process died"
    assert without_effect("autocast-off", off, under(state(1), state(7)).build()) == ""
    assert without_effect("autocast-off", SCRIPT, under().build()) == ""


def test_what_the_run_says_is_read_from_where_it_fails() -> None:
    """Nowhere, at the same place, or at another; nothing where the untreated run did not fail."""
    off = change_of(remedies()["autocast-off"])(SCRIPT)
    before = overflow().build()
    error = Raised(
        n=9001,
        step=1,
        call=1,
        phase="forward",
        type="RuntimeError",
        message="mixed",
        frames=["/x/a.py:1 f"],
        modules=[],
    )

    def read(trace: TraceBuilder, *, passes: bool) -> Diagnostic | None:
        return diagnostic("autocast-off", off, trace.build(), before, passes=passes)

    assert read(under(state(2)), passes=True) == Diagnostic(effects=2, bearing=Bearing.NEEDED)
    assert read(under(state(2), failing=True), passes=False) == Diagnostic(effects=2, bearing=Bearing.NOT_NEEDED)
    assert read(under(state(2)).add(error), passes=False) == Diagnostic(effects=2, bearing=Bearing.MOVED)
    healthy = diagnostic("autocast-off", off, under(state(2)).build(), None, passes=True)
    assert healthy == Diagnostic(effects=2, bearing=None)


def trial(bearing: Bearing, remedy: str = "autocast-off") -> Trial:
    """A run under another condition."""
    passes = bearing is Bearing.NEEDED
    return Trial(
        remedy=remedy,
        summary="open no region",
        outcome=Outcome.FIXED if passes else Outcome.NOT_FIXED,
        reason="" if passes else "b is not finite in step 2",
        safe=False,
        diagnostic=Diagnostic(effects=3, bearing=bearing),
    )


@pytest.mark.parametrize(
    ("finding", "bearing", "confidence", "said"),
    [
        ("autocast-bypass", Bearing.NEEDED, Confidence.PROVEN, "It requires autocast"),
        ("autocast-bypass", Bearing.NOT_NEEDED, Confidence.POSSIBLE, "contradicts the cause"),
        ("autocast-bypass", Bearing.MOVED, Confidence.LIKELY, "fails elsewhere (b is not finite in step 2)"),
        ("autocast-contradicts-model", Bearing.NEEDED, Confidence.LIKELY, "It requires autocast"),
        ("float16-overflow", Bearing.NEEDED, Confidence.LIKELY, "It requires autocast"),
        ("float16-overflow", Bearing.NOT_NEEDED, Confidence.LIKELY, "does not require autocast"),
    ],
)
def test_a_condition_proves_or_denies_only_a_finding_that_names_it_as_its_cause(
    finding: str, bearing: Bearing, confidence: Confidence, said: str
) -> None:
    """For the others it is one more measurement, and what takes away more than the cause proves nothing."""
    (found,) = apply_ablations([replace(FOUND, id=finding, confidence=Confidence.LIKELY)], [trial(bearing)])
    assert found.confidence is confidence
    assert said in " ".join(found.evidence)
    assert "took effect 3 times" in found.evidence[0]


def test_a_run_speaks_of_the_first_finding_and_of_those_that_propose_it() -> None:
    """Not of one that has nothing to do with it."""
    other = replace(FOUND, id="update-stall")
    proposing = replace(other, remedies=("autocast-off",))
    first, second, third = apply_ablations([FOUND, other, proposing], [trial(Bearing.NEEDED)])
    assert (len(first.evidence), len(second.evidence), len(third.evidence)) == (1, 0, 1)


def test_a_run_that_passes_under_another_condition_is_not_called_a_cure() -> None:
    """Neither in the headline, nor on the first screen, nor in the table."""
    untried = not_tried(remedies()["bfloat16"], "only the script can")
    report = Report(
        name="case", status=Status.FINDINGS, headline="", findings=(FOUND,), trials=(trial(Bearing.NEEDED), untried)
    )
    facts = [(label, plain_text(line)) for label, line in facts_of(report)]
    assert ("ablation", "autocast-off: the run passes (diagnostic only, not a fix)") in facts
    ((label, told),) = [fact for fact in facts if fact[0] in ("fixed by", "suggested fix")]
    assert label == "suggested fix"
    assert told.startswith("bfloat16")
    assert cures(report) == []
    assert cured_sentence(report.trials) == ""
    line, _ = remedy_lines(report)
    assert (line.outcome, line.change) == ("passes", "Open no region. Diagnostic only, not a fix.")
    line, _ = remedy_lines(replace(report, trials=(not_tried(remedies()["compile-off"], "why", condition=True),)))
    assert (line.outcome, line.change.rpartition(". ")[2]) == ("not tried", "Diagnostic only, not a fix.")
