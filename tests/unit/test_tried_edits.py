"""An edit is shown as a change of the source only where it was tried and helps; else it is told in words."""

from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared import OK
from test_judge import raised, run, trained
from traces import TraceBuilder

from dtypedoctor.cli.scripts import _as_seen
from dtypedoctor.diagnosis.rule import Advice, Confidence, Edit, Finding, Severity
from dtypedoctor.examination.examine import SECONDS, EditTrials, _remaining, edited_files, insane_losses, judge_edits
from dtypedoctor.examination.results import Outcome, Trial
from dtypedoctor.replay.capsule import Capsule
from dtypedoctor.runner.command import Program
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Coverage, Metric, Observation, Observed
from dtypedoctor.trace.records.execution import Unscaled
from dtypedoctor.trace.records.silent import RoundedSum, RoundedUse

EDIT = Edit(file="train.py", line=3, old="m = m.half()", new="m = m.bfloat16()")
OTHER = replace(EDIT, new="m = m.float()")
FINDING = Finding(
    id="float16-overflow",
    severity=Severity.ERROR,
    confidence=Confidence.PROVEN,
    summary="It overflows.",
    cause="",
    step=3,
)
BEFORE = run(trained())


@pytest.fixture(autouse=True)
def program(tmp_path: Path) -> Iterator[None]:
    """The file that is edited, in the working directory."""
    (tmp_path / "train.py").write_text("import torch\n\nm = m.half()\n")
    with chdir(tmp_path):
        yield


def test_a_loss_that_differs_in_each_run_says_nothing(tmp_path: Path) -> None:
    """Nothing seeds the random numbers: another run of the program as it is has another loss, too."""
    runs: dict[str, Run | str] = {EDIT.new: run(of_losses(5.0, 4.0, 3.0)), EDIT.old: run(of_losses(4.0, 4.0, 3.0))}
    assert judged(runs=runs).edits == (EDIT,)


def of_losses(*losses: float) -> TraceBuilder:
    trace = TraceBuilder().sample("out", 3.0)
    for step, loss in enumerate(losses, 1):
        trace.add(Metric(n=trace.n(), step=step, values={"loss": loss}))
    return trace


def judged(
    maker: str = "half-to-bfloat16",
    *,
    runs: dict[str, Run | str] | None = None,
    fixes: tuple[dict[str, Any], ...] = (),
    trials: tuple[Trial, ...] = (),
    proof: str | None = None,
    step: int = 3,
    dtype: str = "float16",
    before: Run = BEFORE,
) -> Advice:
    """The advice after its trials: ``runs`` by what the third line becomes in them; None where the program cannot be run again."""
    advice = Advice(
        finding=FINDING.id,
        text="Use bfloat16.",
        edits=(EDIT,),
        maker=maker,
        others=(Advice(finding=FINDING.id, text="Use float32.", edits=(OTHER,), maker="half-to-float32"),),
    )
    capsule = Capsule(directory=Path(), description={"fixes": list(fixes)}, bytes=0)

    def attempt(label: str, edited: dict[str, str], seconds: int) -> Run | str:
        (text,) = edited.values()
        return (runs or {}).get(text.splitlines()[2], before)

    made = EditTrials(before, capsule, trials, attempt if runs is not None else None)
    (one,) = judge_edits([replace(FINDING, proven_by=proof, step=step, dtype=dtype)], [advice], made)
    return one


def test_of_several_edits_the_first_is_shown_that_helps() -> None:
    """The run with the first raises, the one with the second does not."""
    one = judged(runs={EDIT.new: run(raised("RuntimeError")), OTHER.new: run(trained())})
    assert (one.edits, one.tried) == ((OTHER,), "run")
    assert one.text == "Use float32. Tried: 3 steps without the failure."


def test_an_edit_that_does_not_help_is_told_in_words() -> None:
    """What the run showed, and where the edit would have been."""
    one = judged(runs=dict.fromkeys((EDIT.new, OTHER.new), run(raised("RuntimeError"))))
    assert (one.edits, one.tried) == ((), "run")
    assert one.text.startswith(
        "No edit helps by itself. Tried in a run (train.py:3), where it does not help: RuntimeError"
    )
    assert "Use bfloat16" not in one.text
    assert one.text.endswith("`dtypedoctor explain float16-overflow` names other ways.")
    assert one.waits, "the program fails otherwise then, so exec --fix may come further"


def test_an_edit_that_failed_gives_way_to_one_that_was_not_tried() -> None:
    """What is known not to help is not what to do."""
    one = judged(runs={EDIT.new: run(raised("RuntimeError")), OTHER.new: "the disk is full"})
    assert one.text == "Use float32. Not tried at train.py:3: the disk is full."
    assert one.waits


def test_a_run_as_long_as_edits_may_take_is_tried_and_a_longer_one_is_not() -> None:
    """The limit is the one that the help states."""

    def text_after(seconds: float) -> str:
        made = EditTrials(run(trained(), ended=replace(OK, seconds=seconds)), attempt=lambda *_: "the disk is full")
        advice = Advice(finding=FINDING.id, text="Use bfloat16.", edits=(EDIT,))
        return judge_edits([FINDING], [advice], made)[0].text

    assert "the disk is full" in text_after(SECONDS)
    assert "an instrumented run takes 61 s, and edits get 60 s" in text_after(SECONDS + 1)


def test_an_edit_that_changes_a_right_loss_does_not_help() -> None:
    """The first loss comes before the failure."""
    changed = run(of_losses(5.0, 4.0, 3.0))
    one = judged(runs=dict.fromkeys((EDIT.new, OTHER.new), changed))
    assert "it changes the loss of step 1, which is right, from 2 to 5" in one.text
    assert judged(runs={EDIT.new: changed}, step=1).edits == (EDIT,)


def test_a_loss_that_is_finite_and_absurd_does_not_help() -> None:
    """A bound in the place of an inf gives such a one."""
    one = judged(runs=dict.fromkeys((EDIT.new, OTHER.new), run(of_losses(2.0, 1.0, 2e34))), dtype="float32")
    assert "the loss is 2e+34 then" in one.text


def test_a_training_that_still_diverges_is_not_mended() -> None:
    """The trial is over before its losses are infinite; one that is large once, as by a corrupt batch, says nothing."""
    grows = [2.0 * 1.3**step for step in range(40)]
    one = judged(runs=dict.fromkeys((EDIT.new, OTHER.new), run(of_losses(*grows))))
    assert "the loss still grows, from 2 to 3.29e+04" in one.text
    once = [2.0, 1.9, 50.0, *[1.5] * 30]
    assert judged(runs={EDIT.new: run(of_losses(*once))}).edits == (EDIT,)


def test_an_edit_that_leaves_out_a_step_of_several_batches_does_not_help() -> None:
    """Of one batch a step, those that are left out have no step: that is what such an edit is for."""

    def trained_with(losses: int, steps: int) -> Run:
        trace = of_losses(*[2.0 - step / 8 for step in range(steps)])
        return run(trace.add(Coverage(losses=losses, losses_measured=losses)), steps=steps)

    def text_with(batches: int) -> str:
        after = trained_with(3 * batches, 3)
        return judged(runs=dict.fromkeys((EDIT.new, OTHER.new), after), before=trained_with(4 * batches, 4)).text

    assert "1 of 4 steps of the optimizer are left out" in text_with(2)
    assert "left out" not in text_with(1)


def test_an_absurd_loss_of_a_program_without_an_optimizer_does_not_help() -> None:
    """It has no steps, and its losses are known from where its backward passes begin."""

    def losses(*sizes: float) -> Run:
        trace = TraceBuilder()
        for call, size in enumerate(sizes, 1):
            trace.sample("", size, kind="loss", phase="backward", call=call)
        return run(trace)

    before = losses(2.0, 1.0)
    assert list(insane_losses(replace(FINDING, dtype="bfloat16"), before, losses(2.0, 7e12))) == [
        "the loss is 7e+12 then"
    ]
    assert not list(insane_losses(replace(FINDING, dtype="bfloat16"), before, losses(2.0, 7.0)))
    assert list(insane_losses(replace(FINDING, dtype="float32"), losses(), losses(1.3e7))) == [
        "the loss is 1.3e+07 then"
    ]  # what was never finite tells nothing of how large it should be


def test_an_edit_that_was_not_tried_is_told_in_words() -> None:
    """With the place, and why it was not tried."""
    one = judged(runs=dict.fromkeys((EDIT.new, OTHER.new), "the disk is full"))
    assert (one.edits, one.tried) == ((), None)
    assert one.text == "Use bfloat16. Not tried at train.py:3: the disk is full."
    assert "the program is not run again from here" in judged().text


def test_edits_of_later_findings_wait_for_the_first() -> None:
    """What is left to mend shows when the program runs with the edit that helps."""
    ways = [Advice(finding=FINDING.id, text="Use it.", edits=(edit,)) for edit in (EDIT, OTHER)]
    first, second = judge_edits([FINDING, FINDING], ways, EditTrials(BEFORE, attempt=lambda *_: run(trained())))
    assert first.edits == (EDIT,)
    assert second.text == "Use it. Not tried at train.py:3: run the program with the edit above first."


def test_a_run_that_does_not_come_to_the_failure_shows_nothing() -> None:
    """It was stopped at its time limit."""
    stopped = run(trained(1), steps=1, ended=replace(OK, timed_out=True))
    assert "does not come to where it fails" in judged(runs=dict.fromkeys((EDIT.new, OTHER.new), stopped)).text


def on_the_call(outcome: str) -> tuple[dict[str, Any], ...]:
    """A fix that was tried on the failing call."""
    return ({"fix": "bfloat16", "outcome": outcome, "reason": "the output is not finite"},)


@pytest.mark.parametrize(
    ("outcome", "tried", "edits", "text"),
    [
        ("fixed", "call", (EDIT,), "Use bfloat16."),
        ("not-fixed", None, (), "Use float32."),
        ("not-tried", None, (), "Use bfloat16."),
    ],
)
def test_where_the_program_is_not_run_again_the_failing_call_tells(
    outcome: str, tried: str | None, edits: tuple[Edit, ...], text: str
) -> None:
    """The fix that changes the call as the edit would is its trial; one that fails there is not what to do."""
    one = judged(fixes=on_the_call(outcome))
    assert (one.tried, one.edits) == (tried, edits)
    assert one.text.startswith(text)


def test_a_run_with_a_fix_counts_more_than_the_call() -> None:
    """The call passes, and the run with the same fix fails later."""
    trial = Trial(remedy="bfloat16", summary="", outcome=Outcome.NOT_FIXED, reason="raises in step 2", safe=False)
    one = judged(fixes=on_the_call("fixed"), trials=(trial,))
    assert one.text.startswith("Use float32. Not tried")


@pytest.mark.parametrize(("proof", "tried"), [("the op run again does not raise", "call"), (None, None)])
def test_a_cast_of_the_failing_line_was_tried_where_the_experiment_proves_it(
    proof: str | None, tried: str | None
) -> None:
    """The operator was run again with the operand cast; what a module around it gets is something else."""
    assert judged("cast-operand", proof=proof).tried == tried
    assert judged("cast-argument", proof=proof).edits == ()


def test_of_an_edit_of_several_lines_the_one_that_is_enough_is_shown() -> None:
    """The text does not speak of the others then."""
    first = Edit(file="train.py", line=1, old="import torch", new="import torch as torch")
    advice = Advice(finding=FINDING.id, text="Do it. All of it.", of_a_part="Do it.", edits=(first, EDIT))

    def shown(enough: str) -> Advice:
        def attempt(label: str, edited: dict[str, str], seconds: int) -> Run:
            (text,) = edited.values()
            return run(trained() if enough in text else raised("RuntimeError"))

        (judged,) = judge_edits([FINDING], [advice], EditTrials(run(raised("RuntimeError")), attempt=attempt))
        return judged

    assert (shown(EDIT.new).edits, shown(EDIT.new).text) == (
        (EDIT,),
        "Do it. Tried: 3 steps without the failure.",
    )


def test_an_edit_after_which_the_loss_is_not_that_of_float64_does_not_help() -> None:
    """It is finite then, and wrong."""
    values = {"use": "loss", "op": "aten.expm1.default", "source": "train.py:3", "made_by": "aten.exp.default",
              "made_at": "train.py:2", "dtype": "float32", "value": "13.06", "exact": "11.26", "changed": 1, "of": 1}  # fmt: skip
    trace = trained()
    trace.add(Observation(n=trace.n(), step=1, call=1, phase="forward", kind="rounded-use", fqn=None, values=values))
    rounded = run(trace)
    one = judged(runs={EDIT.new: rounded, OTHER.new: run(trained())})
    assert one.edits == (OTHER,)
    assert (
        "the loss is 13.06 then, and 11.26 in float64"
        in judged(runs=dict.fromkeys((EDIT.new, OTHER.new), rounded)).text
    )


def test_an_edit_that_leaves_a_scaler_with_what_it_is_not_for_does_not_help() -> None:
    """The run goes on, and something is found that was not there before: a part of the change was left out."""
    trace = trained()
    unscaled = Unscaled(
        scale=1.0, optimizer="SGD", params={"bfloat16": 4}, gradients={"bfloat16": 4}, names={}, strangers=0
    )
    trace.add(Observed(n=trace.n(), step=1, call=1, phase="optimizer", fqn=None, what=unscaled))
    one = judged(runs={EDIT.new: run(trace), OTHER.new: run(trained())})
    assert one.edits == (OTHER,)


def test_the_edited_files_are_what_the_patch_makes_of_them() -> None:
    """A line may become several, or go."""
    gone = replace(EDIT, line=1, old="import torch", new="")
    assert list(edited_files([gone, replace(EDIT, new="a\nb")]).values()) == ["\na\nb\n"]
    with pytest.raises(ValueError, match="has changed"):
        edited_files([replace(EDIT, old="something else")])


@pytest.mark.parametrize(
    ("dtype", "line", "objections"),
    [
        ("float32", 9, []),
        ("float16", 9, ["rounded-result recurs"]),
        ("float32", 3, ["rounded-result recurs"]),
    ],
    ids=["what the wider dtype rounds elsewhere", "the same, one line on", "the same line"],
)
def test_what_a_wider_dtype_rounds_on_another_line_speaks_against_no_edit(
    dtype: str, line: int, objections: list[str]
) -> None:
    """It was there before, below what the edit mends; what has only moved was not mended."""
    trace = trained()
    rounded = RoundedUse(
        use="decision", op="aten.argmin.default", source="train.py:12", made_by="aten.sub.Tensor", made_at=f"train.py:{line}",
        dtype=dtype, value="1", exact="2", changed=90, of=100,
    )  # fmt: skip
    trace.add(Observed(n=trace.n(), step=1, call=1, phase="forward", fqn=None, what=rounded))
    finding = replace(FINDING, id="rounded-result", severity=Severity.WARNING, dtype="float16", source="train.py:3")
    assert list(_remaining(finding, [finding], run(trace))) == objections
    other = replace(finding, source="train.py:9")
    left = ["rounded-result at train.py:9 is left"] if dtype == "float16" else objections
    assert list(_remaining(finding, [finding, other], run(trace))) == left


def test_an_edit_that_leaves_what_is_told_of_elsewhere_is_shown_where_no_other_helps() -> None:
    """Two sums are rounded, and each line is a finding of its own; an edit that mends both comes first."""

    def sums(*lines: int) -> Run:
        trace = trained()
        for line in lines:
            what = RoundedSum(source=f"train.py:{line}", dtype="bfloat16", added=99, exact=9.0, value=4.0, error=5.0)
            trace.add(Observed(n=trace.n(), step=1, call=1, phase="forward", fqn=None, what=what))
        return run(trace)

    def shown(after: dict[str, Run | str]) -> Advice:
        finding = replace(FINDING, id="rounded-sum", severity=Severity.WARNING, dtype="bfloat16", source="train.py:3")
        other = Advice(finding=finding.id, text="Whole.", edits=(OTHER,), maker="bfloat16-to-float32")
        advice = Advice(finding=finding.id, text="Do it.", edits=(EDIT,), maker="in-wider-dtype", others=(other,))

        def attempt(label: str, edited: dict[str, str], seconds: int) -> Run | str:
            (text,) = edited.values()
            return after[text.splitlines()[2]]

        (one,) = judge_edits([finding], [advice], EditTrials(sums(3, 5), attempt=attempt))
        return one

    assert shown({EDIT.new: sums(5), OTHER.new: sums()}).edits == (OTHER,)
    partly = shown({EDIT.new: sums(5), OTHER.new: sums(3)})
    assert partly.edits == (EDIT,)
    assert "rounded-sum at train.py:5 is left" in partly.text


def test_an_edit_with_lines_that_name_what_others_use_is_shown_whole() -> None:
    """A part of it may pass, and leave a name that nothing uses, or a result in another dtype."""
    named = replace(EDIT, new="before = m.dtype\nm = m.float()")
    used = replace(EDIT, line=1, old="import torch", new="import torch as t")
    advice = Advice(finding=FINDING.id, text="Do it.", edits=(named, used), maker="in-wider-dtype")
    made = EditTrials(BEFORE, attempt=lambda label, edited, seconds: run(trained()))
    (one,) = judge_edits([FINDING], [advice], made)
    assert one.edits == (named, used)


@pytest.mark.parametrize(("skipped", "budget"), [(0, "off"), (90, "off"), (110, "auto")])
def test_a_trial_looks_at_all_steps_where_the_first_run_looked_at_most(skipped: int, budget: str) -> None:
    """Which ones a share of the time pays for differs from run to run: a failure in a step that was not looked at is not gone."""
    trace = trained()
    trace.add(Coverage(module_calls=100, module_calls_measured=100, module_calls_skipped=skipped))
    again = _as_seen(Program(name="train", path="train.py", overhead_budget="auto"), run(trace))
    assert again.overhead_budget == budget
