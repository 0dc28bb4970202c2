"""Real runs of the same model, compared through the real command line."""

import json
from pathlib import Path

import pytest
from command import Finished, dtypedoctor, in_this_process

from dtypedoctor.trace.lines import seal

SCENARIO = """\
name: {name}
summary: A tiny Llama, trained for two steps.
steps:
  - model: {{name: "builtin:llama-tiny", dtype: {dtype}, attention: {attention}}}
    workload: {{kind: train, steps: 2}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training in float32 and bfloat16, with both implementations of attention."""
    place = tmp_path_factory.mktemp("compare")
    (place / "scenarios").mkdir()
    for name, dtype, attention in (
        ("sdpa", "float32", "sdpa"),
        ("again", "float32", "sdpa"),
        ("eager", "float32", "eager"),
        ("bfloat16", "bfloat16", "sdpa"),
    ):
        text = SCENARIO.format(name=name, dtype=dtype, attention=attention)
        (place / "scenarios" / f"{name}.yaml").write_text(text)
    finished = in_this_process("run", place / "scenarios", "--no-remedies", "--out", place / "runs")
    assert finished.code in (0, 10), finished.err  # updates may stall in bfloat16, which is a finding
    return place / "runs"


def compare(runs: Path, a: str, b: str, *options: str) -> Finished:
    return in_this_process("compare", a, b, *options, cwd=runs)


def test_a_repeated_run_is_equal_to_the_last_digit(runs: Path) -> None:
    """Exit 0 at tolerance zero: same seed, same machine, same numbers."""
    finished = compare(runs, "sdpa", "again", "--tolerance", "0")
    assert finished.code == 0, finished.out
    assert finished.out.startswith("EQUAL: ")
    assert "bitwise equal" in finished.out


def test_two_dtypes_are_compared_module_by_module(runs: Path) -> None:
    """The forward pass agrees within the roundings of bfloat16; what differs in dtype is listed."""
    finished = compare(runs, "sdpa", "bfloat16", "--format", "json")
    document = json.loads(finished.out)
    assert finished.code in (0, 10)
    assert document["tolerance"] == 0.125
    assert document["settings"] == [{"name": "steps.0.model.dtype", "a": "float32", "b": "bfloat16"}]
    forward = [m for m in document["modules"] if m["lane"] == "forward"]
    changed = {(tuple(m["dtypes_a"]), tuple(m["dtypes_b"])) for m in forward if m["fqn"] == "lm_head"}
    assert changed == {(("float32",), ("bfloat16",))}
    assert 0 < max(m["max_error"] for m in forward) < 0.125
    assert document["lone_a"] == document["lone_b"] == 0


def test_a_run_with_a_damaged_parameter_is_told_apart(runs: Path, tmp_path: Path) -> None:
    """One measurement of one module is changed in a copy of the trace: it is the first divergence, by name."""
    lines = (runs / "sdpa" / "before" / "events.jsonl").read_text().splitlines()
    target = next(
        json.loads(line)["id"] for line in lines if '"model.layers.1.mlp.down_proj"' in line and '"output"' in line
    )
    samples = [json.loads(line) if line.startswith('["s"') else None for line in lines]
    index = next(i for i, s in enumerate(samples) if s and any(row[0] == target for row in s[4]))
    changed = samples[index]
    assert changed is not None
    changed[4] = [[row[0], row[1] * 3, *row[2:]] if row[0] == target else row for row in changed[4]]
    (tmp_path / "copy").mkdir()
    body = json.dumps(changed[:5], separators=(",", ":")).encode()
    lines[index] = seal(body, index + 1).decode()
    (tmp_path / "copy" / "events.jsonl").write_text("\n".join(lines) + "\n")
    finished = compare(runs, "sdpa", str(tmp_path / "copy"))
    assert finished.code == 10
    headline = finished.said
    assert headline.startswith("DIVERGED: layers.1.mlp.down_proj is the first to differ, in step 1 (forward)")


def test_an_unwatched_run_is_no_match(runs: Path) -> None:
    """Its losses agree, and that nothing else was measured is the first thing said."""
    finished = compare(runs, "sdpa", "sdpa/unwatched")
    assert finished.code == 10
    assert finished.out.startswith("INCOMPLETE: what both have agrees, but B was not instrumented")


def test_a_markdown_comparison_is_clean_on_stdout(runs: Path) -> None:
    """It can be piped into a ticket: headline first, no colour, nothing on stderr."""
    finished = compare(runs, "sdpa", "bfloat16", "--format", "md")
    assert finished.out.startswith("## ")
    assert "\x1b" not in finished.out
    assert finished.err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere", "sdpa"), "nowhere: no such directory"),
        (("sdpa", ".."), "no trace here"),
        (("sdpa", "sdpa", "--tolerance", "-1"), "not a relative error"),
        (("sdpa", "sdpa", "--tolerance", "nan"), "not a relative error"),
        (("sdpa", "sdpa", "--tolerance", "few"), "--tolerance"),
        (("sdpa",), "RUN_B"),
    ],
)
def test_bad_input_ends_with_two_and_a_reason(runs: Path, arguments: tuple[str, ...], said: str) -> None:
    """Exit 2, no traceback."""
    finished = in_this_process("compare", *arguments, cwd=runs)
    assert finished.code == 2
    assert said in finished.err
    assert "Traceback" not in finished.err


def test_comparing_imports_nothing_heavy(runs: Path) -> None:
    """Two traces are read and compared on this side of the border."""
    finished = dtypedoctor("compare", "sdpa", "again", cwd=runs, PYTHONPROFILEIMPORTTIME="1")
    names = {line.rsplit("|", 1)[-1].strip() for line in finished.err.splitlines() if line.startswith("import time:")}
    assert len(names) > 20
    assert not names & {"torch", "numpy", "transformers"}
