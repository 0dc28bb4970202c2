"""Every kind of wrong value and key is named at its place in plain words."""

from pathlib import Path

import pytest
from scenario_files import HEALTHY, mistakes, written

from dtypedoctor.lab.scenarios.loading import load_scenario

# An extra line at the end of a healthy scenario, which is line 7, and what is said about it.
TOP_LEVEL = {
    "a key without a near one": ("zzz: 1", "7:1: zzz: unknown key"),
    "a misspelt key": ("sead: 1", "7:1: sead: unknown key; did you mean 'seed'?"),
    "a key of another part": ("autocast: {}", "7:1: autocast: unknown key here"),
    "a key with a dot": ("a.b: 1", "7:1: 'a.b': unknown key"),
    "yes instead of a number": ("seed: yes", "7:1: seed: Input should be a valid integer, got 'yes'"),
    "a number of thousands of digits": ("seed: " + "9" * 5000, "7:1: seed: this number is too large"),
    "no number": ("seed: .nan", "7:1: seed: inf and NaN are not accepted"),
    "a number instead of a text": ("references: [1]", "7:14: references[0]: Input should be a valid string, got 1"),
    "a misspelt choice": (
        "device: cdua",
        "7:1: device: Input should be 'auto', 'cpu' or 'cuda', got 'cdua'; did you mean 'cuda'?",
    ),
    "a dtype by another name": (
        "reference: {dtype: half}",
        "7:13: reference.dtype: Input should be 'float16', 'bfloat16', 'float32' or 'float64', got 'half'; did you mean 'float16'?",
    ),
    "a missing key inside": ("corrections: [{modules: []}]", "7:15: corrections[0].id: Field required"),
}


@pytest.mark.parametrize(("line", "said"), TOP_LEVEL.values(), ids=TOP_LEVEL.keys())
def test_a_wrong_line_is_named_at_its_place(tmp_path: Path, line: str, said: str) -> None:
    """Each kind of mistake gives exactly one line with its place, what is wanted and what was given."""
    assert mistakes(written(tmp_path, HEALTHY + line + "\n")) == [said]


def test_a_file_of_another_kind_is_told_what_a_scenario_is(tmp_path: Path) -> None:
    """A list, a text or nothing at the top is one mistake, not a list of missing keys."""
    assert mistakes(written(tmp_path, "- a\n")) == ["1:1: Input should be a valid dictionary"]
    assert mistakes(written(tmp_path, "hello\n")) == ["1:1: Input should be a valid dictionary, got 'hello'"]
    assert mistakes(written(tmp_path, "---\n# nothing\n")) == ["1:1: the file is empty"]
    assert mistakes(written(tmp_path, "null\n")) == ["1:1: Input should be a valid dictionary"]


def test_the_first_step_needs_a_model(tmp_path: Path) -> None:
    """Only later steps can take over a model; a script brings its own."""
    without = HEALTHY.replace('model: {name: "builtin:gemma4-tiny"}', "name: first")
    assert mistakes(written(tmp_path, without)) == ["3:1: steps: the first step needs a model"]
    script = "name: example\nsummary: s\nsteps: [{workload: {kind: script, path: a.py}}]\n"
    assert load_scenario(written(tmp_path, script)).steps[0].model is None


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ("{workload: S}, {model: M, workload: F}", "a script is the only step of its scenario: it runs in a process of its own"),
        ("{model: M, workload: F}, {workload: S}", "a script is the only step of its scenario: it runs in a process of its own"),
        ("{model: M, workload: S, compile: {}}", "a script makes its model and its regions itself: leave out model, compile"),
    ],
)  # fmt: skip
def test_what_stands_beside_a_script_in_a_scenario_is_refused(tmp_path: Path, steps: str, why: str) -> None:
    """A script has a process to itself, so another step would not be run, and a model or a region would have no effect."""
    steps = steps.replace("S", "{kind: script, path: a.py}").replace("F", "{kind: forward}")
    text = f"name: example\nsummary: s\nsteps: [{steps.replace('M', '{name: builtin:gemma4-tiny}')}]\n"
    assert mistakes(written(tmp_path, text)) == [f"3:1: steps: {why}"]


def test_a_script_has_no_reference(tmp_path: Path) -> None:
    """The same script would be run again, as it is, and called the healthy run."""
    text = "name: example\nsummary: s\nsteps: [{workload: {kind: script, path: a.py}}]\nreference: {dtype: bfloat16}\n"
    (said,) = mistakes(written(tmp_path, text))
    assert "a script has no `reference`" in said


def test_the_name_is_that_of_the_file(tmp_path: Path) -> None:
    """A copied scenario must be renamed inside too, or its reports would be taken for the original's."""
    assert mistakes(written(tmp_path, HEALTHY, name="copy")) == [
        "1:1: name: must be 'copy', the file's name, got 'example'"
    ]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """One look at the message is enough to repair the whole file."""
    text = """\
name: other
sumary: x
seed: yes
steps:
  - model: {name: 1, dtype: bf16}
    workload: {kind: train, stpes: 1, max_grad_norm: big}
seed: 2
"""
    assert [line.split(": ")[0] for line in mistakes(written(tmp_path, text))] == [
        "1:1", "2:1", "3:1", "5:13", "5:22", "6:29", "6:39", "7:1",
    ]  # fmt: skip


def test_a_thousand_mistakes_are_cut_with_their_number(tmp_path: Path) -> None:
    """A file that is something else entirely does not flood the terminal."""
    said = mistakes(written(tmp_path, HEALTHY + "".join(f"zz{i}: 1\n" for i in range(1000))))
    assert len(said) == 101
    assert said[-1] == "and 900 more mistakes"


def test_numbers_and_words_follow_yaml_1_2(tmp_path: Path) -> None:
    """`1e-3` is a number, `yes` and dates are texts, a leading zero does not make octal, whole numbers pass as fractions."""
    text = (
        HEALTHY.replace("kind: forward", "kind: train\n      learning_rate: 1e-3\n      max_grad_norm: 2")
        + "references: [yes, 2026-04-01, 0b1, 1_000, 12:30:45, on, '1']\nseed: 010\ntime_limit: +16\n"
    )
    scenario = load_scenario(written(tmp_path, text))
    workload = scenario.steps[0].workload
    assert workload.kind == "train"
    assert (workload.learning_rate, workload.max_grad_norm) == (1e-3, 2.0)
    assert scenario.references == ["yes", "2026-04-01", "0b1", "1_000", "12:30:45", "on", "1"]
    assert (scenario.seed, scenario.time_limit) == (10, 16)
