"""``pytest --dtypedoctor`` on a real test suite: which tests it fails, what it says of them, and that the others stay as they are."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from patience import PATIENCE

pytestmark = pytest.mark.slow

SUITE = """
import sys

import pytest
import torch
from torch import nn

NAME = "user"


def overflow():
    layer = nn.Linear(4, 4, bias=False).half()
    with torch.no_grad():
        layer.weight.fill_(6e4)
    return layer(torch.full((1, 4), 100.0).half())


def test_mismatch():
    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())(torch.ones(2, 4))


def test_silent_overflow():
    assert overflow().isinf().all()


def test_healthy(capsys):
    nn.Linear(2, 2)(torch.ones(1, 2))
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "")


@pytest.mark.no_dtype_findings
def test_marked():
    overflow()


@pytest.mark.no_dtype_findings("float16-overflow")
def test_allowed():
    overflow()


def test_with_the_fixture(no_dtype_findings):
    overflow()


@pytest.mark.no_dtype_findings
def test_nothing_measured():
    import subprocess
    subprocess.run([sys.executable, "-c", "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))"], check=True)


def test_other():
    assert NAME == "somebody"
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with a test suite in it."""
    (tmp_path / "test_model.py").write_text(SUITE)
    return tmp_path


def pytest_in(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Runs pytest as its users do; where the package is installed without its entry points, the plug-in is named."""
    installed = [each.name for each in entry_points(group="pytest11")]
    named = [] if "dtypedoctor" in installed else ["-p", "dtypedoctor.pytest_plugin"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *named, "-p", "no:cacheprovider", "-q", "-rA", *options],
        cwd=folder, env={**os.environ, "PYTEST_ADDOPTS": "", "COLUMNS": "200"}, capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip


def test_findings_are_in_the_reports_of_tests_that_fail(suite: Path) -> None:
    """A test that raised says why, one that passed is named with what is silent; marked ones fail; in a process of xdist."""
    done = pytest_in(suite, "--dtypedoctor", "--strict-markers", "-n", "1", "--dtypedoctor-out", "kept")
    lines = done.stdout.splitlines()
    outcomes = {
        line.split("::")[1].split()[0]: line.split()[0] for line in lines if line.startswith(("PASSED", "FAILED"))
    }
    assert outcomes == {
        "test_mismatch": "FAILED", "test_silent_overflow": "PASSED", "test_healthy": "PASSED", "test_marked": "FAILED",
        "test_allowed": "PASSED", "test_with_the_fixture": "FAILED", "test_nothing_measured": "FAILED", "test_other": "FAILED",
    }  # fmt: skip
    told = done.stdout.partition("test_mismatch ___")[2].partition("__ test_")[0]
    assert "mat1 and mat2 must have the same dtype" in told
    assert "operand-dtype-mismatch (" in told
    assert "test_model.py:19" in told
    silent = lines[next(at for at, line in enumerate(lines) if "passed with findings" in line) :]
    assert "test_model.py::test_silent_overflow: float16-overflow" in silent
    assert not [line for line in silent if line.startswith("test_model.py::test_healthy")]
    assert len(list((suite / "kept").glob("test_model.py-test_*/report.json"))) == 8


def test_without_the_option_nothing_is_imported(suite: Path) -> None:
    """Tests run as ever, and the plug-in has imported neither torch nor anything of the doctor."""
    (suite / "test_light.py").write_text(
        "import sys\n\ndef test_light():\n"
        "    ours = [name for name in sys.modules if name.startswith('dtypedoctor.')]\n"
        "    assert ours == ['dtypedoctor.pytest_plugin'] and 'torch' not in sys.modules\n"
    )
    done = pytest_in(suite, "test_light.py")
    assert "1 passed" in done.stdout, done.stdout
    assert not (suite / "runs").exists()
