"""What a worker says about the machine that it runs on."""

import builtins
import importlib.metadata
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dtypedoctor.redaction.secrets import ALLOWED_VARIABLES
from dtypedoctor.worker import environment
from dtypedoctor.worker.environment import PACKAGES, VARIABLES, describe_environment


def test_every_recorded_variable_may_stand_in_a_public_report() -> None:
    """What the worker records and redaction then hides would only say that there is something."""
    assert set(VARIABLES) <= ALLOWED_VARIABLES


def test_packages_that_are_not_installed_are_left_out() -> None:
    """A version for each that is there, nothing for the others."""
    versions = describe_environment(torch.device("cpu"))["versions"]
    assert versions["numpy"] == importlib.metadata.version("numpy")
    assert set(versions) < set(PACKAGES)


def test_of_torch_the_build_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's wheel of 2.9.1 is called 2.9.1, as is one for another CUDA; torch itself says which."""
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert describe_environment(torch.device("cpu"))["versions"]["torch"] == "2.9.1+cu128"


def test_the_driver_is_read_where_linux_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is unknown where it does not."""
    assert describe_environment(torch.device("cpu"))["driver"] is None or environment.DRIVER.exists()
    (tmp_path / "version").write_text("580.95.05\n")
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
    assert describe_environment(torch.device("cpu"))["driver"] == "580.95.05"


def test_no_function_of_the_program_is_called_and_no_program_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it has replaced meanwhile: files are read, folders listed and versions found by what was bound before."""
    numpy_version = importlib.metadata.version("numpy")
    calls: list[str] = []

    def replace(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, replacement)

    for owner, names in (
        (builtins, ("open",)),
        (io, ("open",)),
        (os, ("listdir", "open", "scandir", "stat", "popen")),
        (subprocess, ("Popen", "check_output")),
        (importlib.metadata, ("version", "distribution")),
    ):
        for name in names:
            replace(owner, name)
    found = describe_environment(torch.device("cpu"))
    assert calls == []
    assert found["versions"]["numpy"] == numpy_version
    assert found["platform"].startswith(f"{os.uname().sysname}-{os.uname().release}-{found['machine']}")


def test_of_two_installed_versions_the_one_that_is_imported_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are compared as packages are: whatever stands between their words."""
    for place, name in (("a", "flash_attn-2.8.3+cu12.dist-info"), ("b", "flash_attn-2.7.0.dist-info"),
                        ("b", "unsloth.zoo-2026.1-py3.11.egg-info"), ("b", "notes-1.txt")):  # fmt: skip
        (tmp_path / place / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "gone"), str(tmp_path / "b")])
    versions = describe_environment(torch.device("cpu"))["versions"]
    assert versions == {"torch": torch.__version__, "flash_attn": "2.8.3+cu12", "unsloth_zoo": "2026.1"}
