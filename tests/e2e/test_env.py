"""The environment table, through the real command line."""

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from command import Finished, dtypedoctor

TOKEN = "hf_" + "Z9y8X7w6" * 4
FORMATS = ("terminal", "md", "json")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """The table in each format, asked for in a folder with a file called torch; for a terminal, imports are listed too."""
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "torch.py").write_text("raise SystemExit('not this one')")
    environment = {
        "HF_TOKEN": TOKEN,
        "MY_DATA": "/home/alice/data",
        "CUDA_LAUNCH_BLOCKING": "1",
        "PYTHONPATH": _without(folder),
    }
    profiled = {"PYTHONPROFILEIMPORTTIME": "1"}
    return {
        format: dtypedoctor(
            "env", "--format", format, cwd=folder, **environment, **(profiled if format == "terminal" else {})
        )
        for format in FORMATS
    }


def _without(place: Path) -> str:
    return os.pathsep.join(path for path in sys.path if path and Path(path) != place)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_called_torch_in_the_working_directory_is_not_taken_for_torch(
    format: str, shown: dict[str, Finished]
) -> None:
    """People type this in the folder of their experiments."""
    assert shown[format].code == 0, shown[format].err


def test_the_table_names_versions_and_devices(shown: dict[str, Finished]) -> None:
    """JSON for programs: the versions are those that are installed; of torch also the build."""
    found = json.loads(shown["json"].out)
    assert found["python"] == platform.python_version()
    for package in ("transformers", "peft", "trl", "bitsandbytes", "accelerate"):
        assert found["versions"][package] == metadata.version(package)
    assert "unsloth" not in found["versions"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"] in ("cpu", "cuda")
    assert {"cuda", "driver", "threads"} <= found.keys()


@pytest.mark.parametrize("format", FORMATS)
def test_only_variables_of_the_allow_list_are_shown(format: str, shown: dict[str, Finished]) -> None:
    """Neither a token nor a variable that nobody asked for, in any format."""
    assert "CUDA_LAUNCH_BLOCKING" in shown[format].out
    for private in (TOKEN, "HF_TOKEN", "MY_DATA", "alice"):
        assert private not in shown[format].out


def test_the_markdown_table_is_clean_on_stdout(shown: dict[str, Finished]) -> None:
    """Every line is a row of one table, so that it can be pasted into a ticket."""
    lines = shown["md"].out.splitlines()
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert any("`versions.torch`" in line for line in lines)
    assert shown["md"].err == ""


def test_describing_the_machine_imports_nothing_heavy_on_this_side(shown: dict[str, Finished]) -> None:
    """torch is imported by a process of its own."""
    lines = shown["terminal"].err.splitlines()
    names = {line.rsplit("|", 1)[-1].strip() for line in lines if line.startswith("import time:")}
    assert len(names) > 20
    assert not names & {"torch", "numpy", "transformers"}


def test_a_torch_that_cannot_be_imported_is_reported_as_what_it_is(tmp_path: Path) -> None:
    """Exit 3, the import's own last words, and what to try; no traceback of ours."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    finished = dtypedoctor("env", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert finished.code == 3
    assert "libcudart.so.13" in finished.err
    assert "import torch" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("format", ["xml", ""])
def test_an_unknown_format_is_a_usage_error(format: str) -> None:
    """Exit 2, and the formats that there are."""
    finished = dtypedoctor("env", "--format", format)
    assert finished.code == 2
    assert "terminal" in finished.err
