"""What a report says about its remedies, and how the runs stand side by side."""

from dataclasses import replace
from pathlib import Path

import pytest
from report_builders import facts_of, overflow, plain_text

from dtypedoctor.cli.reported import _next_of_script
from dtypedoctor.diagnosis.rule import Advice, Edit
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.report.document import Fold, Paragraph, Table, parts_of
from dtypedoctor.report.fixes import before_after, cured_sentence, cures, remedy_lines
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.run_facts import ranked_facts, raw_sentence
from dtypedoctor.report.to_json import Outcome, Report, Trial
from dtypedoctor.report.to_md import render_markdown


def with_a_failed_first_trial() -> Report:
    """The overflow, with a strict remedy that raised, listed before those that cure."""
    report = overflow()
    assert report.before is not None
    run = replace(report.before, label="strict", finding_ids=("operand-dtype-mismatch",))
    strict = replace(
        report.trials[0],
        remedy="strict",
        summary="cast nothing: raise",
        outcome=Outcome.NOT_FIXED,
        as_intended=True,
        reason="MixedDtypesError in step 1",
        run=run,
    )
    return replace(report, trials=(strict, *report.trials))


def test_remedies_that_cure_come_first_each_with_what_it_changes() -> None:
    """Then those that do not cure, then those that were not tried; a sentence begins with a capital and ends with a stop."""
    lines = remedy_lines(with_a_failed_first_trial())
    assert [(line.id, line.outcome) for line in lines] == [
        ("gemma4-mlp-float32-product", "fixed"),
        ("bfloat16", "fixed"),
        ("strict", "raises, as intended"),
        ("mlp-clamp", "not tried"),
    ]
    assert lines[2].change == "Cast nothing: raise."
    assert lines[3].change == "Clamps the product. Unsafe."
    assert [line.result for line in cures(with_a_failed_first_trial())] == ["8/8 steps; 1/8 without it"] * 2


def test_runs_that_cure_stand_beside_the_untreated_one_and_the_others_apart() -> None:
    """Before, cures, reference; and the findings of the untreated run are those that the report tells."""
    table, *notes, failed = before_after(with_a_failed_first_trial()).blocks
    assert isinstance(table, Table)
    assert table.header == ("", "baseline", "gemma4-mlp-float32-product", "bfloat16", "reference (bfloat16)")
    assert plain_text({row[0]: row for row in table.rows}["findings"][1]) == "float16-overflow"
    assert any("operand-dtype-mismatch" in plain_text(note.line) for note in notes if isinstance(note, Paragraph))
    assert isinstance(failed, Fold)
    assert failed.title == "1 check that raises, as intended"
    assert [block.header for block in failed.blocks if isinstance(block, Table)] == [("", "strict")]


REPLAY = {
    "module": "layers.0.mlp",
    "class": "Gemma4TextMLP",
    "capsule": "runs/first/capsule",
    "dtype": "float16",
    "op": "aten.mul.Tensor",
    "verdict": "Same verdict as in the run: float16-overflow, aten.mul.Tensor.",
}


def test_a_fix_that_works_on_the_call_of_a_capsule_is_fixed_here() -> None:
    """Everywhere in the report; whether it fixes the run is another question, and what answers it is named."""
    report = replace(overflow(), replay=REPLAY)
    text = render_markdown(run_document(report))
    assert {line.outcome for line in remedy_lines(report)} == {"fixed on this call", "not tried"}
    assert "dtypedoctor exec --try FIX SCRIPT" in text
    assert "replay of the call of layers.0.mlp (Gemma4TextMLP), from capsule runs/first/capsule, float16" in text
    assert REPLAY["verdict"] in text
    assert "on this call, fixed by" in {fact.label for fact in ranked_facts(report)}
    assert "on this call" not in render_markdown(run_document(overflow()))
    assert cured_sentence([report.trials[1]], here=True) == " On this call, fixed by bfloat16."


def test_a_replay_in_another_dtype_says_what_failed_in_the_run() -> None:
    """There is no verdict to compare."""
    about = run_document(replace(overflow(), replay={**REPLAY, "module": "", "dtype": "float32", "verdict": ""})).about
    assert "the whole model (Gemma4TextMLP), from capsule runs/first/capsule, float32" in about
    assert "; in the run aten.mul.Tensor failed." in about


def test_a_run_that_left_a_capsule_says_how_to_try_fixes_on_it() -> None:
    """Where none was tried on the run."""
    capsule = {
        "directory": "capsule",
        "module": "mlp",
        "class": "MLP",
        "bytes": 2048,
        "holds": "weights",
        "allow_code": True,
    }
    untried = tuple(replace(trial, outcome=Outcome.NOT_TRIED, run=None) for trial in overflow().trials)
    command = "Try them on the failing call, without running the script: dtypedoctor replay RUN/capsule --allow-code"
    assert command in render_markdown(run_document(replace(overflow(), trials=untried, capsule=capsule)))
    assert command not in render_markdown(run_document(replace(overflow(), capsule=capsule)))


def test_remedies_that_could_not_be_tried_are_not_said_to_fail() -> None:
    """None of those tried cures, or none was tried at all and one could be, or there is none."""
    report = replace(overflow(), do_this=())
    refused, failed = report.trials[2], replace(report.trials[0], outcome=Outcome.NOT_FIXED)

    def told(*trials: Trial) -> list[tuple[str, str]]:
        facts = facts_of(replace(report, trials=trials, findings=(replace(report.findings[0], remedies=()),)))
        return [
            (label, plain_text(parts_of(line)[0])) for label, line in facts if label in ("fixed by", "suggested fix")
        ]

    assert told(refused) == [("suggested fix", refused.remedy)]
    assert told(refused, failed) == [
        ("fixed by", "none of the fixes tried; `dtypedoctor explain float16-overflow` lists others")
    ]
    assert told() == []
    edit = Edit(file="train.py", line=3, old="a", new="b")
    report = replace(report, do_this=(Advice(finding="float16-overflow", text="Change it.", edits=(edit,)),))
    assert told() == [("suggested fix", "the edit above, in your own source")]


@pytest.mark.parametrize(
    ("outcome", "suggested"),
    [
        ("fixed", "gemma4-mlp-float32-product: Multiplies (the failing call passes with it)"),
        ("not-fixed", "mlp-clamp: Clamps. Unsafe"),
        ("not-tried", "gemma4-mlp-float32-product: Multiplies"),
    ],
)
def test_no_fix_is_suggested_that_does_not_fix_the_failing_call(outcome: str, suggested: str) -> None:
    """Where no run was made with a fix, what became of the call alone decides, and is said."""
    untried = [replace(t, outcome=Outcome.NOT_TRIED, run=None) for t in (overflow().trials[0], overflow().trials[2])]
    trials = tuple(replace(t, summary=words) for t, words in zip(untried, ("Multiplies.", "Clamps."), strict=True))
    finding = replace(overflow().findings[0], remedies=())
    capsule = {"directory": "capsule", "fixes": [{"fix": trials[0].remedy, "outcome": outcome, "reason": "inf"}]}
    facts = facts_of(replace(overflow(), trials=trials, findings=(finding,), capsule=capsule))
    assert next(plain_text(line) for label, line in facts if label == "suggested fix") == suggested


def test_what_to_type_next_is_the_users_own_command() -> None:
    """With the edit that is shown; else with the first fix that a script can take; nothing where fixes were tried, or for what is no script.

    The run directory is not named again: it is there already.
    """
    report = replace(overflow(), command="dtypedoctor exec --out o train.py --out p", do_this=())
    reason = "not requested: --try bfloat16 runs the script again with it"
    untried = replace(report.trials[0], remedy="bfloat16", outcome=Outcome.NOT_TRIED, reason=reason, run=None)
    assert _next_of_script(report, Path("o")) == ""
    suggested = replace(report, trials=(replace(untried, reason="it needs a scenario"), untried))
    assert _next_of_script(suggested, Path("o")) == "dtypedoctor exec --try bfloat16 train.py --out p"
    options = "--rerun --try bfloat16: it shows whether bfloat16 fixes the failure"
    assert _next_of_script(report, Path("o"), options) == "dtypedoctor exec --rerun --try bfloat16 train.py --out p"
    edit = Edit(file="train.py", line=3, old="a", new="b")
    edited = replace(suggested, do_this=(Advice(finding="float16-overflow", text="Change it.", edits=(edit,)),))
    assert _next_of_script(edited, Path("o")) == "dtypedoctor exec train.py --out p"
    assert (
        run_document(replace(edited, next_command="dtypedoctor exec train.py")).next_title
        == "Next, after the edit above"
    )
    assert _next_of_script(replace(edited, command="dtypedoctor run case.yaml"), Path("o")) == ""


def test_every_remedy_that_keeps_the_meaning_of_the_run_has_a_preference() -> None:
    """Those that only raise, change nothing where it matters, or show what a failure needs have none."""
    safe = {remedy.id for remedy in remedies().values() if remedy.safe and not remedy.strict}
    assert {remedy.id for remedy in remedies().values() if remedy.prefer} == safe - {
        "reconcile-dtypes-honouring-keep-list"
    }


def test_a_fix_of_the_failing_call_is_named_as_try_takes_it() -> None:
    """`keep-float32` alone is no fix of a script: its module belongs to it."""
    capsule = {
        "directory": "capsule",
        "module": "layers.2.mlp",
        "class": "GatedMLP",
        "bytes": 2048,
        "holds": "weights",
        "fixes": [{"fix": "keep-float32", "outcome": "fixed", "reason": ""}],
    }
    text = render_markdown(run_document(replace(overflow(), capsule=capsule)))
    assert "keep-float32:layers.2.mlp" in text
    assert "Run layers.2.mlp (GatedMLP) in float32" in text


def test_the_program_s_output_is_where_there_is_some() -> None:
    """Both streams where both hold something; a report from before has one path."""
    both = {"raw_stdout": "before/stdout.txt", "raw_stderr": "before/stderr.txt", "raw_output": "before/stderr.txt"}
    assert "output is in before/stdout.txt and before/stderr.txt, not" in raw_sentence(replace(overflow(), files=both))
    old = {"raw_output": "before/stderr.txt"}
    assert "output is in before/stderr.txt, not" in raw_sentence(replace(overflow(), files=old))


def test_a_headline_names_safe_cures_and_few_of_them() -> None:
    """A remedy that may hide the failure is no cure beside others, and is called by its name alone."""
    safe = overflow().trials[1]
    unsafe = replace(safe, remedy="cast-it", safe=False)
    several = [unsafe, *(replace(safe, remedy=name) for name in ("a", "b", "c"))]
    assert cured_sentence(several) == " Fixed by a or b (and 1 more)."
    assert cured_sentence([unsafe, safe]) == " Fixed by bfloat16."
    assert cured_sentence([unsafe]) == " It disappears with cast-it, which may only hide it."
    assert cured_sentence([overflow().trials[2]]) == ""
