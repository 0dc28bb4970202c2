"""Which tests run by default, with ``-m release`` and with ``-m ""``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("n", [0, 1])
def test_some(n): ...

@pytest.mark.release
def test_rare(): ...

@pytest.mark.release
@pytest.mark.gpu
def test_on_a_gpu(): ...

def test_always(): ...
"""
DEFAULT = {"test_some[0]", "test_on_a_gpu", "test_always"}
REST = {"test_some[1]", "test_rare"}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("options", "chosen"),
    [([], DEFAULT), (["-m", "release"], REST), (["-m", ""], DEFAULT | REST), (["-m", "gpu"], {"test_on_a_gpu"})],
    ids=["default", "release", "everything", "gpu"],
)
def test_release_tests_run_only_where_they_are_asked_for(options: list[str], chosen: set[str], tmp_path: Path) -> None:
    """Of a parametrized test the first cases stay in the default tier, and so does what only a GPU can run."""
    (tmp_path / "test_tiers.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, *options, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert {line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line} == chosen, done.stdout
