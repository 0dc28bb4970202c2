"""A check of another package: one file with what watches, what it writes and the rule that reads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "e2e" / "extension" / "tinylab"
RECORDING = """
import sys, torch
import dtypedoctor
layer = torch.nn.Linear(4, 1).bfloat16()
with dtypedoctor.watch(out=sys.argv[1]):
    for _ in range(3):
        layer(torch.ones(2, 4, dtype=torch.bfloat16)).mean().backward()
"""
READING = """
import sys
from pathlib import Path

import pytest
from dtypedoctor.diagnosis import diagnose
from dtypedoctor.trace.reader import read_trace
print(*((f.id, f.step, f.dtype) for f in diagnose(read_trace(Path(sys.argv[1])))), "torch" in sys.modules)
"""


def installed(folder: Path, code: str = "") -> Path:
    """A folder with the package ``tinylab``, as an installer leaves it, of which only the check is registered."""
    package, metadata = folder / "tinylab", folder / "tinylab-0.1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / "check.py").write_text((PACKAGE / "check.py").read_text() + code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tinylab\nVersion: 0.1\n")
    groups = {"checks": "CHECK", "rules": "RULE"}
    entries = [f"[dtypedoctor.{group}]\ntinylab = tinylab.check:{name}\n" for group, name in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(entries))
    return folder


def output_of(code: str, site: Path, directory: Path) -> str:
    """What a program prints where the package is installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code, directory], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_check_of_another_package_is_found_without_an_entry_in_a_table(tmp_path: Path) -> None:
    """Its class hears of the moments that it has methods for; its record is read, and its rule runs, where torch is not imported."""
    site, directory = installed(tmp_path), tmp_path / "run"
    output_of(RECORDING, site, directory)
    assert "('tinylab-half-loss', 1, 'bfloat16') False" in output_of(
        READING, site, next(directory.rglob("events.jsonl")).parent
    )


@pytest.mark.release
def test_a_check_that_names_no_observer_is_named_as_not_watching(tmp_path: Path) -> None:
    """The program runs as it would."""
    site, directory = (
        installed(tmp_path, "\nCHECK = Check(name='wrong', observe='tinylab.check:detect')\n"),
        tmp_path / "run",
    )
    output_of(RECORDING, site, directory)
    assert "no subclass of Observer" in (directory / "report.md").read_text()


def test_what_a_check_of_another_package_raises_reaches_neither_the_program_nor_other_checks(tmp_path: Path) -> None:
    """It is named as not watched."""
    site, directory = (
        installed(tmp_path, "\nHalfLosses.before_backward = lambda self, tensors: 1 / 0\n"),
        tmp_path / "run",
    )
    assert (
        "the check tinylab-half-loss" in output_of(RECORDING, site, directory) + (directory / "report.md").read_text()
    )
