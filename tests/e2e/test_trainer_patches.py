"""Corrections of the trainers that are installed (TRL, transformers), as the patches that ``explain --patch`` prints for their maintainers."""

import importlib.util
import os
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from command import forked, in_this_process, report_of

from dtypedoctor.corrections.contract import install_edits
from dtypedoctor.plugins import Correction, registered

pytestmark = pytest.mark.release

PROGRAMS = Path(__file__).parents[2] / "scenarios" / "trainers" / "programs"
ADAPTERS, SCORES = "trl-float32-adapters", "transformers-opt-float32-scores"
CASES = {
    ADAPTERS: [("adapters.py", "dpo", "packed"), ("adapters.py", "grpo", "packed", "saved")],
    SCORES: [("overflow.py", "opt", "float16")],
}
"""By correction, the programs of the scenarios that fail without it."""


def proposed_tests(correction: Correction) -> dict[str, Any]:
    """The test file that goes with a patch, executed."""
    text = files("dtypedoctor.lab.corrections.libraries").joinpath(correction.test).read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(text, correction.test, "exec"), names)  # noqa: S102
    return names


def patched_library(name: str, folder: Path) -> None:
    """The installed package in ``folder``, its files links, after ``patch -p1`` with what ``explain`` prints for it."""
    correction = registered(Correction)[name]
    origin = importlib.util.find_spec(correction.library).origin
    package, ignored = Path(origin).parent, shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / correction.library, copy_function=os.symlink, ignore=ignored)
    for edit in correction.edits:
        file = Path(*edit.module.split(".")).with_suffix(".py")
        (folder / file).unlink()
        shutil.copyfile(package.parent / file, folder / file)
    diff = in_this_process("explain", name, "--patch").out
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=diff, text=True, cwd=folder, check=True, capture_output=True)


def test_adapters_of_a_packed_model_stay_in_float32_with_the_edit(tmp_path: Path) -> None:
    """The test that the patch adds fails before and passes after."""
    correction = registered(Correction)[ADAPTERS]
    test = proposed_tests(correction)["test_adapters_of_a_packed_model_stay_in_float32_and_are_trained"]
    with pytest.raises(AssertionError):
        test(tmp_path / "before")
    installed = install_edits(correction)
    try:
        test(tmp_path / "after")
    finally:
        installed.undo()
    assert installed.counters.hits == 4


def test_scores_of_opt_stay_finite_with_the_edit() -> None:
    """The test that the patch adds fails before, in float16 only, and passes after in every dtype."""
    import torch

    correction = registered(Correction)[SCORES]
    test = proposed_tests(correction)["test_scores_under_a_mask_of_the_smallest_number_stay_finite"]
    with pytest.raises(AssertionError):
        test(torch.float16)
    installed = install_edits(correction)
    try:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            test(dtype)
    finally:
        installed.undo()


@pytest.mark.parametrize("name", CASES)
def test_a_patch_applies_to_the_installed_release_as_it_is_printed(name: str, tmp_path: Path) -> None:
    """Every file that it names, without fuzz; afterwards the correction is not needed, and says where it is."""
    patched_library(name, tmp_path)
    again = in_this_process("explain", name, "--patch", "--source", tmp_path)
    assert again.code == 2
    assert f"{name} is not needed: " in again.err
    assert (tmp_path / "tests" / f"test_{name.replace('-', '_')}.py").is_file()


@pytest.mark.parametrize(
    ("name", "program"), [(name, program) for name, programs in CASES.items() for program in programs]
)
def test_the_failing_programs_are_healthy_with_the_patched_library(
    name: str, program: tuple[str, ...], tmp_path: Path
) -> None:
    """Nothing is found in them any more, and they complete."""
    patched_library(name, tmp_path / "library")
    path = {"PYTHONPATH": str(tmp_path / "library"), "OMP_NUM_THREADS": "1"}
    done = forked("exec", "--out", tmp_path / "run", PROGRAMS / program[0], *program[1:], **path)
    assert (done.code, report_of(tmp_path / "run")["findings"]) == (0, [])


def test_a_script_keeps_its_adapters_in_float32_with_treat() -> None:
    """One line says which of TRL's trainers is corrected: the one that the script imports."""
    script = (
        "from trl.trainer.dpo_trainer import DPOTrainer; from trl.trainer import sft_trainer, dpo_trainer; "
        "print(DPOTrainer.__init__ is dpo_trainer.DPOTrainer.__init__)"
    )
    done = forked("treat", "--with", ADAPTERS, "-c", script, OMP_NUM_THREADS="1")
    assert done.out.strip() == "True", done.err
    assert f"dtypedoctor: {ADAPTERS} is in place: trl " in done.err
    assert "trl/trainer/dpo_trainer.py:" in done.err
    assert "was not used" not in done.err
