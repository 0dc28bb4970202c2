"""unsloth's released kernels, unchanged: a second 4-bit model in another dtype is read from memory of the first one's."""

import re
import subprocess
from pathlib import Path

import pytest
from command import dtypedoctor, forked, in_this_process, python, report_of
from released_wheels import WHEELS, released

from dtypedoctor.plugins import Correction, registered
from dtypedoctor.source_edits import AlreadyCorrectedError, TargetMismatchError, patched

pytestmark = pytest.mark.release

REAL = Path(__file__).parents[2] / "scenarios" / "real"
STATES = REAL / "programs" / "unsloth_states.py"
STATE_CORRECTION = "unsloth-state-of-input-dtype"
VALUES = Path(__file__).parent / "unsloth_values.py"
LAST_WITH_THE_DEFECT, FIRST_WITHOUT = "2026.2.1", "2026.3.1"
CORRECTION = "unsloth-buffer-of-its-dtype"
ALONE = {"OMP_NUM_THREADS": "1"}


def test_the_stale_buffer_of_the_released_kernels_is_found_under_autocast_and_fixed(tmp_path: Path) -> None:
    """Nothing raises and everything is finite; the finding names the first wrong weight and unsloth's own line."""
    released("unsloth", LAST_WITH_THE_DEFECT)
    scenario = REAL / "unsloth_two_loads_autocast.yaml"
    done = forked("run", scenario, "--allow-code", "--wheels", WHEELS, "--out", tmp_path / "run", cwd=tmp_path, **ALONE)
    report = report_of(tmp_path / "run")
    [found] = report["findings"]
    assert done.code == 0, done.err
    assert (found["id"], found["confidence"], found["dtype"]) == ("stale-dequant-buffer", "proven", "bfloat16")
    assert found["fqn"].endswith("layers.0.self_attn.q_proj.base_layer")
    assert found["source"] == "unsloth/kernels/utils.py:1023"
    assert found["remedies"][0] == CORRECTION
    assert [trial["remedy"] for trial in report["trials"] if trial["outcome"] == "fixed"] == [CORRECTION]


def test_the_corrected_release_has_no_findings(tmp_path: Path) -> None:
    """The same program, in the order in which the buffer also has to grow."""
    released("unsloth", FIRST_WITHOUT)
    scenario = REAL / "unsloth_two_loads_fixed.yaml"
    done = forked(
        "run",
        scenario,
        "--no-remedies",
        "--allow-code",
        "--wheels",
        WHEELS,
        "--out",
        tmp_path / "run",
        cwd=tmp_path,
        **ALONE,
    )
    assert (done.code, report_of(tmp_path / "run")["findings"]) == (0, [])


def test_treated_kernels_dequantize_and_train_bitwise_as_the_corrected_release() -> None:
    """In both orders of two dtypes, with and without autocast; every weight is bitwise that of bitsandbytes."""
    old, new = released("unsloth", LAST_WITH_THE_DEFECT), released("unsloth", FIRST_WITHOUT)
    treated = forked("treat", "--with", CORRECTION, VALUES, old, **ALONE)
    expected = values_of(new)
    assert f"{CORRECTION} is in place: unsloth {LAST_WITH_THE_DEFECT}, unsloth/kernels/utils.py:501" in treated.err
    assert treated.out.splitlines() == expected
    assert [line.split("\t")[3] for line in expected] == ["0"] * 4
    untreated = [line.split("\t")[3] for line in values_of(old)]
    assert [answer.startswith("expected m1 and m2") or int(answer) > 0 for answer in untreated] == [True] * 4


def values_of(folder: Path, program: Path = VALUES) -> list[str]:
    """What the kernels of an unpacked wheel compute."""
    done = python(program, folder, **ALONE)
    assert done.code == 0, done.err
    return done.out.splitlines()


@pytest.mark.parametrize(
    ("correction", "test", "count"),
    [
        (CORRECTION, "tests/test_unsloth_buffer_of_its_dtype.py", 6),
        (STATE_CORRECTION, "tests/test_unsloth_state_of_input_dtype.py", 1),
    ],
)
def test_the_patch_applies_to_the_release_and_makes_its_test_pass(
    correction: str, test: str, count: int, tmp_path: Path
) -> None:
    """`git apply` takes it as it is printed. Before, the test fails."""
    wheel = released("unsloth", LAST_WITH_THE_DEFECT)
    kernels = tmp_path / "unsloth" / "kernels"
    kernels.mkdir(parents=True)
    for file in (
        "unsloth/__init__.py",
        *(f"unsloth/kernels/{one.name}" for one in (wheel / "unsloth/kernels").glob("*.py")),
    ):
        (tmp_path / file).write_bytes((wheel / file).read_bytes())
    patch = in_this_process("explain", correction, "--patch", "--source", tmp_path)
    subprocess.run(["git", "apply", f"--include={test}", "-"], input=patch.out, text=True, cwd=tmp_path, check=True)
    assert f"{count} failed" in last_line_of_pytest(tmp_path, test)
    (tmp_path / test).unlink()
    subprocess.run(["git", "apply", "-"], input=patch.out, text=True, cwd=tmp_path, check=True)
    assert f"{count} passed" in last_line_of_pytest(tmp_path, test)


def last_line_of_pytest(folder: Path, test: str) -> str:
    program = (
        f"import sys; sys.path.insert(0, {str(REAL / 'programs')!r}); import unsloth_kernels, pytest\n"
        f"unsloth_kernels.load('.'); pytest.main(['-q', '-p', 'no:cacheprovider', {test!r}])"
    )
    return python("-c", program, cwd=folder, **ALONE).out.splitlines()[-1]


@pytest.mark.parametrize("version", ["2025.9.1", "2026.10.9"])
def test_a_state_of_another_dtype_than_the_activations_is_right_in_every_use(version: str) -> None:
    """Forward, backward and decoding, three pairs of dtypes, with and without autocast; untreated all but a few raise or are wrong."""
    treated = forked("treat", "--with", STATE_CORRECTION, STATES, released("unsloth", version), **ALONE)
    answers = [line.split("\t")[-1] for line in treated.out.splitlines()]
    assert len(answers) == 18, treated.err
    assert max(float(answer.removeprefix("error ")) for answer in answers) < 0.01


def test_grpo_on_a_checkpoint_saved_in_float16_finishes_near_float32_with_the_correction_alone(tmp_path: Path) -> None:
    """TRL's trainer on a 4-bit Llama in bfloat16, through the kernels of the last release: without the correction its first product raises."""
    program, release = REAL / "programs" / "unsloth_grpo.py", released("unsloth", "2026.10.9")
    command = program, release, "2", "saved"
    treated = forked("treat", "--with", STATE_CORRECTION, *command, cwd=tmp_path, **ALONE)
    assert "trained 2 steps" in treated.out.splitlines(), treated.err
    divergences = [float(text) for text in re.findall(r"texts: (\S+)", treated.out)]
    assert len(divergences) == 4
    assert max(divergences) < 2e-4
    untreated = python(*command, cwd=tmp_path, **ALONE)
    assert "to have the same dtype, but got: c10::BFloat16 != c10::Half" in untreated.err


def test_decoding_with_stale_adapters_is_found_by_one_run(tmp_path: Path) -> None:
    """The old release keeps the adapters that it has cast in the first generation, so that later ones sample from the untrained policy."""
    program, release = REAL / "programs" / "unsloth_grpo.py", released("unsloth", LAST_WITH_THE_DEFECT)
    done = forked("exec", "--out", tmp_path / "run", program, release, "4", cwd=tmp_path, **ALONE)
    assert done.code == 10, done.err
    report = report_of(tmp_path / "run")
    [found], [advice] = report["findings"], report["do_this"]
    assert (found["id"], found["phase"], found["step"], found["confidence"]) == ("logprob-gap", "generate", 2, "proven")
    assert found["source"] == "unsloth/kernels/utils.py:978"
    assert found["fqn"].endswith("layers.0.self_attn.q_proj.lora_A.default")
    assert (found["source"] in advice["text"], advice["edits"]) == (True, [])


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ("2025.9.1", None),
        ("2026.1.1", None),
        ("2026.4.4", "has this correction already"),
        ("2026.7.6", "has this correction already"),
        ("2026.10.9", "has this correction already"),
    ],
)
def test_every_other_release_is_corrected_or_answered_with_the_difference(version: str, answer: str | None) -> None:
    """Older ones have the same lines, written otherwise around them; newer ones have their own correction."""
    file = released("unsloth", version) / "unsloth" / "kernels" / "utils.py"
    source, edits = file.read_text(encoding="utf-8"), registered(Correction)[CORRECTION].edits
    if answer is None:
        assert patched(source, edits, "utils.py").count("WEIGHT_BUFFER.dtype != dtype") == 2
        return
    with pytest.raises(TargetMismatchError, match=answer) as refused:
        patched(source, edits, "utils.py")
    assert isinstance(refused.value, AlreadyCorrectedError)


def test_a_release_that_is_not_there_is_asked_for_in_one_line(tmp_path: Path) -> None:
    """With the command that fetches it; in a folder of scenarios it is a row like any other."""
    done = dtypedoctor("run", REAL / "unsloth_two_loads.yaml", "--allow-code", "--wheels", tmp_path, cwd=tmp_path)
    assert done.code == 2
    assert "unsloth_two_loads requires unsloth==2026.2.1, which is neither installed nor in" in done.err
    assert f"hint: pip install --no-deps --target {tmp_path}/unsloth-2026.2.1 unsloth==2026.2.1\n" in done.err
    several = dtypedoctor(
        "run", "scenarios/real", "--out", tmp_path / "out", cwd=tmp_path
    )  # they come with the package
    assert several.code == 2
    command = "pip install --no-deps --target wheels/unsloth-2026.2.1 unsloth==2026.2.1  # then pass --wheels wheels"
    assert f"unsloth_two_loads: {command}\n" in several.err
