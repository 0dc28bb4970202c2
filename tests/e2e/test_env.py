"""The environment table, through the real command line."""

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest
from command import dtypedoctor


def test_the_table_names_versions_devices_and_what_torch_says_itself() -> None:
    """JSON for programs: the versions are those that are installed, and torch's own tool agrees with them."""
    finished = dtypedoctor("env", "--format", "json", OMP_NUM_THREADS="1")
    assert finished.code == 0, finished.err
    found = json.loads(finished.out)
    assert found["python"] == platform.python_version()
    for package in ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate"):
        assert found["versions"][package] == metadata.version(package)
    assert "unsloth" not in found["versions"]
    assert found["collect_env"]["torch_version"] == found["versions"]["torch"]
    assert found["device"] in ("cpu", "cuda")
    assert {"cuda", "driver", "threads"} <= found.keys()


def test_only_variables_of_the_allow_list_are_shown(tmp_path: Path) -> None:
    """Neither a token nor a variable that nobody asked for, in any format."""
    token = "hf_" + "Z9y8X7w6" * 4
    for format in ("terminal", "md", "json"):
        finished = dtypedoctor(
            "env",
            "--format",
            format,
            HF_TOKEN=token,
            MY_DATA="/home/alice/data",
            CUDA_LAUNCH_BLOCKING="1",
            cwd=tmp_path,
        )
        assert finished.code == 0, finished.err
        assert "CUDA_LAUNCH_BLOCKING" in finished.out
        for private in (token, "HF_TOKEN", "MY_DATA", "alice"):
            assert private not in finished.out


def test_the_markdown_table_is_clean_on_stdout() -> None:
    """Every line is a row of one table, so that it can be pasted into a ticket."""
    finished = dtypedoctor("env", "--format", "md")
    lines = finished.out.splitlines()
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert any("`versions.torch`" in line for line in lines)
    assert finished.err == ""


def test_a_file_called_torch_in_the_working_directory_is_not_taken_for_torch(tmp_path: Path) -> None:
    """People type this in the folder of their experiments."""
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')")
    finished = dtypedoctor("env", "--format", "json", cwd=tmp_path, PYTHONPATH=_without(tmp_path))
    assert finished.code == 0, finished.err


def _without(place: Path) -> str:
    return os.pathsep.join(path for path in sys.path if path and Path(path) != place)


def test_a_torch_that_cannot_be_imported_is_reported_as_what_it_is(tmp_path: Path) -> None:
    """Exit 3, the import's own last words, and what to try; no traceback of ours."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    finished = dtypedoctor("env", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert finished.code == 3
    assert "libcudart.so.13" in finished.err
    assert "import torch" in finished.err
    assert "Traceback" not in finished.err


def test_describing_the_machine_imports_nothing_heavy_on_this_side() -> None:
    """torch is imported by a process of its own."""
    finished = dtypedoctor("env", PYTHONPROFILEIMPORTTIME="1")
    names = {line.rsplit("|", 1)[-1].strip() for line in finished.err.splitlines() if line.startswith("import time:")}
    assert len(names) > 20
    assert not names & {"torch", "numpy", "transformers"}


@pytest.mark.parametrize("format", ["xml", ""])
def test_an_unknown_format_is_a_usage_error(format: str) -> None:
    """Exit 2, and the formats that there are."""
    finished = dtypedoctor("env", "--format", format)
    assert finished.code == 2
    assert "terminal" in finished.err
