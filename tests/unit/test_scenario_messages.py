"""Every kind of wrong value and key is named at its place in plain words."""

from pathlib import Path
from typing import get_args

import pytest
from scenario_files import HEALTHY, mistakes, written

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.scenario.model import Workload

KINDS = ", ".join(get_args(one.model_fields["kind"].annotation)[0] for one in get_args(get_args(Workload)[0]))
"""Every workload, in the order of the model."""

# An extra line at the end of a healthy scenario, which is line 7, and what is said about it.
TOP_LEVEL = {
    "a key without a near one": ("zzz: 1", "7:1: zzz: unknown key"),
    "a misspelt key": ("sead: 1", "7:1: sead: unknown key; did you mean 'seed'?"),
    "a key in capitals": ("SEED: 1", "7:1: SEED: unknown key; did you mean 'seed'?"),
    "a key that is misspelt beside the right one": (
        "sumary: x",
        "7:1: sumary: unknown key; did you mean 'summary'?",
    ),
    "a key with a dot": ("a.b: 1", "7:1: 'a.b': unknown key"),
    "yes instead of a number": ("seed: yes", "7:7: seed: must be an integer, got 'yes'"),
    "true instead of a number": ("seed: true", "7:7: seed: must be an integer, got true"),
    "a fraction instead of a whole number": ("seed: 1.5", "7:7: seed: must be an integer, got 1.5"),
    "an exponent instead of a whole number": ("seed: 1e3", "7:7: seed: must be an integer, got 1000.0"),
    "a quoted number": ('seed: "1"', "7:7: seed: must be an integer, got '1'"),
    "a date instead of a number": ("seed: 2026-04-01", "7:7: seed: must be an integer, got '2026-04-01'"),
    "nothing instead of a number": ("seed:", "7:6: seed: must be an integer, got nothing"),
    "a list instead of a number": ("seed: [1]", "7:7: seed: must be an integer, got a list"),
    "a mapping instead of a number": ("seed: {a: 1}", "7:7: seed: must be an integer, got a mapping"),
    "a number that is too small": ("seed: -1", "7:7: seed: must be at least 0, got -1"),
    "a number that is too large": ("seed: 4294967296", "7:7: seed: must be less than 4294967296, got 4294967296"),
    "a number above a limit": ("time_limit: 604801", "7:13: time_limit: must be at most 604800, got 604801"),
    "a number beyond 64 bits": (
        "seed: 9223372036854775808",
        "7:7: seed: this integer is larger than 9223372036854775807",
    ),
    "a number of thousands of digits": (
        "seed: " + "9" * 5000,
        "7:7: seed: this integer is larger than 9223372036854775807",
    ),
    "yes instead of true": ("deterministic: yes", "7:16: deterministic: must be true or false, got 'yes'"),
    "a number instead of true": ("deterministic: 1", "7:16: deterministic: must be true or false, got 1"),
    "a text instead of a list": ("references: x", "7:13: references: must be a list, got 'x'"),
    "a list instead of a mapping": ("reference: []", "7:12: reference: must be a mapping, got a list"),
    "a text instead of a mapping": ("expect: healthy", "7:9: expect: must be a mapping, got 'healthy'"),
    "a number instead of a text": ("references: [1]", "7:14: references[0]: must be text, got 1; put it in quotes"),
    "true instead of a text": ("references: [true]", "7:14: references[0]: must be text, got true; put it in quotes"),
    "nothing instead of a text": ("references: [~]", "7:14: references[0]: must be text, got nothing"),
    "a misspelt choice": (
        "device: cdua",
        "7:9: device: must be one of auto, cpu, cuda, got 'cdua'; did you mean 'cuda'?",
    ),
    "a choice without a near one": ("device: tpu9000", "7:9: device: must be one of auto, cpu, cuda, got 'tpu9000'"),
    "a number instead of a choice": ("device: 0", "7:9: device: must be one of auto, cpu, cuda, got 0"),
    "a dtype by another name": (
        "reference: {dtype: half}",
        "7:20: reference.dtype: must be one of float16, bfloat16, float32, float64, got 'half'; did you mean 'float16'?",
    ),
    "an id with capitals": (
        "remedies: [Bfloat16]",
        (
            "7:12: remedies[0]: must be lowercase letters, digits, '.', '_' and '-', beginning with a letter or digit, "
            "got 'Bfloat16'"
        ),
    ),
    "an id that is too long": (
        f"remedies: [{'a' * 1001}]",
        f"7:12: remedies[0]: must be at most 1000 characters, got '{'a' * 60}…'",
    ),
    "a missing key inside": ("corrections: [{modules: []}]", "7:15: corrections[0].id: this key is missing"),
}


@pytest.mark.parametrize(("line", "said"), TOP_LEVEL.values(), ids=TOP_LEVEL.keys())
def test_a_wrong_line_is_named_at_its_place(tmp_path: Path, line: str, said: str) -> None:
    """Each kind of mistake gives exactly one line with its place, what is wanted and what was given."""
    assert mistakes(written(tmp_path, HEALTHY + line + "\n")) == [said]


# The second step of a scenario, written on line 7 from column 5 on, and what is said about it.
STEP = {
    "a text instead of a step": ("forward", ["7:5: steps[1]: must be a mapping, got 'forward'"]),
    "no workload": ("{name: a}", ["7:5: steps[1].workload: this key is missing"]),
    "a text instead of a workload": (
        "{workload: grpo}",
        ["7:16: steps[1].workload: must be a mapping, got 'grpo'"],
    ),
    "no kind": ("{workload: {}}", ["7:16: steps[1].workload: the key 'kind' is missing"]),
    "a misspelt kind": (
        "{workload: {kind: gpro}}",
        [f"7:23: steps[1].workload.kind: must be one of {KINDS}, got 'gpro'; did you mean 'grpo'?"],
    ),
    "an unknown kind": (
        "{workload: {kind: dpo9}}",
        [f"7:23: steps[1].workload.kind: must be one of {KINDS}, got 'dpo9'"],
    ),
    "a number as kind": (
        "{workload: {kind: 3}}",
        [f"7:23: steps[1].workload.kind: must be one of {KINDS}, got 3"],
    ),
    "nothing as kind": (
        "{workload: {kind: }}",
        [f"7:22: steps[1].workload.kind: must be one of {KINDS}, got nothing"],
    ),
    "a key misspelt inside a workload": (
        "{workload: {kind: grpo, generatoins: 2}}",
        ["7:29: steps[1].workload.generatoins: unknown key; did you mean 'generations'?"],
    ),
    "a key of another workload": (
        "{workload: {kind: unload, steps: 2}}",
        ["7:31: steps[1].workload.steps: unknown key"],
    ),
    "a workload's name as a key of it": (
        "{workload: {kind: unload, unload: 2}}",
        ["7:31: steps[1].workload.unload: unknown key"],
    ),
    "words instead of a number": (
        "{workload: {kind: grpo, steps: eight}}",
        ["7:36: steps[1].workload.steps: must be an integer, got 'eight'"],
    ),
    "a number that is too small in a workload": (
        "{workload: {kind: grpo, generations: 1}}",
        ["7:42: steps[1].workload.generations: must be at least 2, got 1"],
    ),
    "yes instead of a fraction": (
        "{workload: {kind: grpo, beta: yes}}",
        ["7:35: steps[1].workload.beta: must be a number, got 'yes'"],
    ),
    "true instead of a fraction": (
        "{workload: {kind: grpo, beta: true}}",
        ["7:35: steps[1].workload.beta: must be a number, got true"],
    ),
    "a fraction that must be more": (
        "{workload: {kind: grpo, learning_rate: 0}}",
        ["7:44: steps[1].workload.learning_rate: must be more than 0, got 0"],
    ),
    "a fraction that is infinite": (
        "{workload: {kind: grpo, learning_rate: 1e999}}",
        ["7:44: steps[1].workload.learning_rate: this is not a finite number"],
    ),
    "a fraction that is no number": (
        "{workload: {kind: grpo, learning_rate: .nan}}",
        ["7:44: steps[1].workload.learning_rate: this is not a finite number"],
    ),
    "a script without a target": (
        "{workload: {kind: script}}",
        ["7:16: steps[1].workload: give either path, module or code"],
    ),
    "an empty list that must not be": (
        "{model: {name: a, lora: {targets: []}}, workload: {kind: unload}}",
        ["7:39: steps[1].model.lora.targets: must have at least 1 entry, got 0"],
    ),
    "a fraction that must be less": (
        "{model: {name: a, lora: {targets: [q], dropout: 1}}, workload: {kind: unload}}",
        ["7:53: steps[1].model.lora.dropout: must be less than 1, got 1"],
    ),
    "a text instead of options": (
        "{model: {name: a, options: b}, workload: {kind: unload}}",
        ["7:32: steps[1].model.options: must be a mapping, got 'b'"],
    ),
    "two misspelt keys": (
        "{modle: {name: a}, wokload: {kind: sft}}",
        [
            "7:6: steps[1].modle: unknown key; did you mean 'module'?",
            "7:24: steps[1].wokload: unknown key; did you mean 'workload'?",
        ],
    ),
}


@pytest.mark.parametrize(("step", "said"), STEP.values(), ids=STEP.keys())
def test_a_wrong_step_is_named_at_its_place(tmp_path: Path, step: str, said: list[str]) -> None:
    """Mistakes inside steps, models and workloads are named as the file has them, at their own line and column."""
    assert mistakes(written(tmp_path, f"{HEALTHY}  - {step}\n")) == said


def test_a_file_of_another_kind_is_told_what_a_scenario_is(tmp_path: Path) -> None:
    """A list, a text or nothing at the top is one mistake, not a list of missing keys."""
    assert mistakes(written(tmp_path, "- a\n")) == ["1:1: a scenario must be a mapping, got a list"]
    assert mistakes(written(tmp_path, "hello\n")) == ["1:1: a scenario must be a mapping, got 'hello'"]
    assert mistakes(written(tmp_path, "---\n# nothing\n")) == ["1:1: the file is empty"]
    assert mistakes(written(tmp_path, "null\n")) == ["1:1: a scenario must be a mapping, got nothing"]


def test_missing_keys_are_named_at_the_mapping_that_lacks_them(tmp_path: Path) -> None:
    """A missing key has no place of its own; the mapping around it stands in."""
    assert mistakes(written(tmp_path, "# a comment\nseed: 1\n")) == [
        "2:1: name: this key is missing",
        "2:1: steps: this key is missing",
        "2:1: summary: this key is missing",
    ]


def test_the_first_step_needs_a_model(tmp_path: Path) -> None:
    """Only later steps can take over a model; a script brings its own."""
    without = HEALTHY.replace('model: {name: "builtin:gemma4-tiny"}', "name: first")
    assert mistakes(written(tmp_path, without)) == ["4:3: steps: the first step needs a model"]
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
    assert mistakes(written(tmp_path, text)) == [f"3:8: steps: {why}"]


def test_a_script_has_no_reference(tmp_path: Path) -> None:
    """The same script would be run again, as it is, and called the healthy run."""
    text = "name: example\nsummary: s\nsteps: [{workload: {kind: script, path: a.py}}]\nreference: {dtype: bfloat16}\n"
    (said,) = mistakes(written(tmp_path, text))
    assert "a script has no `reference`" in said


def test_the_name_is_that_of_the_file(tmp_path: Path) -> None:
    """A copied scenario must be renamed inside too, or its reports would be taken for the original's."""
    assert mistakes(written(tmp_path, HEALTHY, name="copy")) == [
        "1:7: name: must be 'copy', the file's name, got 'example'"
    ]


def test_a_file_whose_name_cannot_be_a_scenarios_is_to_be_renamed(tmp_path: Path) -> None:
    """Asking for the file's name would only lead to the next mistake."""
    assert mistakes(written(tmp_path, HEALTHY, name="My Copy")) == [
        "1:7: name: must be the file's name, but 'My Copy' cannot be one; rename the file"
    ]


def test_ids_that_nothing_has_are_mistakes_where_the_known_ones_are_given(tmp_path: Path) -> None:
    """Finding, remedy and correction ids are held against the registries that the caller passes."""
    text = HEALTHY + (
        "expect: {findings: [float16-overflw], cured_by: [bfloat16], not_cured_by: [zzz]}\n"
        "remedies: [bfloat61]\n"
        "corrections: [{id: gemma4-mlp}, {id: yes}]\n"
    )
    known = {"finding": ["float16-overflow"], "remedy": {"bfloat16": object()}, "correction": ("gemma4-mlp-float32",)}
    assert mistakes(written(tmp_path, text), known) == [
        "7:21: expect.findings[0]: no finding has the id 'float16-overflw'; did you mean 'float16-overflow'?",
        "7:76: expect.not_cured_by[0]: no remedy has the id 'zzz'",
        "8:12: remedies[0]: no remedy has the id 'bfloat61'; did you mean 'bfloat16'?",
        "9:20: corrections[0].id: no correction has the id 'gemma4-mlp'; did you mean 'gemma4-mlp-float32'?",
        "9:38: corrections[1].id: no correction has the id 'yes'",
    ]
    assert load_scenario(written(tmp_path, text)).remedies == ["bfloat61"]


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
        "1:7", "2:1", "3:7", "5:19", "5:29", "6:29", "6:54", "7:1",
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
        + "references: [yes, 2026-04-01, 0b1, 1_000, 12:30:45, on, '1']\nseed: 010\ntime_limit: 0x10\n"
    )
    scenario = load_scenario(written(tmp_path, text))
    workload = scenario.steps[0].workload
    assert workload.kind == "train"
    assert (workload.learning_rate, workload.max_grad_norm) == (1e-3, 2.0)
    assert scenario.references == ["yes", "2026-04-01", "0b1", "1_000", "12:30:45", "on", "1"]
    assert (scenario.seed, scenario.time_limit) == (10, 16)


def test_a_name_that_does_not_print_is_escaped(tmp_path: Path) -> None:
    """Line breaks and undecodable bytes in a file's name cannot break the one-mistake-a-line format."""
    path = tmp_path / "a\nb\udcff.yaml"
    path.write_text("- a\n")
    with pytest.raises(UsageError) as refused:
        load_scenario(path)
    assert refused.value.message == f"{tmp_path}/a\\nb\\udcff.yaml:1:1: a scenario must be a mapping, got a list"
