"""The import contracts break where the border is crossed in either direction, and where a part of the package has no place in them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import PATIENCE

import dtypedoctor

PACKAGE = Path(dtypedoctor.__file__).parent
CONFIGURATION = PACKAGE.parent / "pyproject.toml"
Lint = Callable[[dict[str, str]], str]

CROSSINGS = {
    "instrument/session.py": "from dtypedoctor.diagnosis import wording",
    "corrections/contract.py": "import dtypedoctor.runner",
    "worker/boot.py": "from dtypedoctor.runner import process",
    "lab/models/builtin.py": "from dtypedoctor.lab.trials import changes",
    "text.py": "from dtypedoctor.instrument import operators",
    "lab/scenarios/model.py": "from dtypedoctor.corrections import contract",
    "diagnosis/ops.py": "import torch",
    "report/build.py": "def later(): from dtypedoctor.lab.trials import judge",
    "worker/script.py": "from dtypedoctor.lab.corrections import treated",
    "trace/events.py": "from dtypedoctor.diagnosis import wording",
    "lab/workloads/trainers.py": "from dtypedoctor.lab.tickets import gemma4",
}
"""An import that must not be, by the file of the package that it is planted in."""


@pytest.fixture
def lint(tmp_path: Path) -> Lint:
    """What import-linter prints of a copy of the package with lines planted at the ends of its files, or in new ones."""
    pytest.importorskip("importlinter")

    def run(planted: dict[str, str]) -> str:
        shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(CONFIGURATION, tmp_path)
        for name, line in planted.items():
            with (tmp_path / PACKAGE.name / name).open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")
        code = "from importlinter.cli import lint_imports_command as command; command()"
        done = subprocess.run(
            [sys.executable, "-c", code, "--config", "pyproject.toml", "--no-cache"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path), "NO_COLOR": "1"},
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        return f"{done.stdout}{done.stderr}\nended with {done.returncode}"

    return run


def test_the_package_keeps_all_import_contracts(lint: Lint) -> None:
    """Nothing is planted, and all contracts are kept."""
    found = lint({})
    assert "0 broken" in found
    assert found.endswith("ended with 0")


def test_each_planted_import_that_breaks_a_contract_is_named(lint: Lint) -> None:
    """Each planted import is reported as the module that holds it and what it imports."""
    found = lint(CROSSINGS)
    assert found.endswith("ended with 1")
    lines = re.sub(r"\s+", " ", found)
    for name, line in CROSSINGS.items():
        importer = f"dtypedoctor.{name.removesuffix('.py').replace('/', '.')}"
        what = line.rpartition("from ")[2].removeprefix("import ").replace(" import ", ".")
        assert f"{importer} -> {what}" in lines


def test_a_part_without_a_place(lint: Lint) -> None:
    """A new part of the package that stands in no layer breaks the contract of the layers."""
    found = lint({"stray.py": '"""A new part."""'})
    assert "stray" in found
    assert found.endswith("ended with 1")
