"""What the package offers by its name, and what that costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import dtypedoctor


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Neither torch nor pydantic; the public names are there all the same."""
    source = (
        "import sys, dtypedoctor; print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'pydantic', 'rich'}),"
        " sorted(dtypedoctor.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert (
        done.stdout
        == "[] ['DtypeDoctorCallback', 'Report', '__version__', 'apply', 'diagnose', 'verify_saved', 'watch']\n"
    )


def test_a_name_that_there_is_not_is_an_ordinary_attribute_error() -> None:
    """So that `hasattr` and typing errors behave as for any module."""
    with pytest.raises(AttributeError, match="no attribute 'wacth'"):
        _ = dtypedoctor.wacth  # type: ignore[attr-defined]


def test_names_that_plugins_know_lead_to_the_laboratory() -> None:
    """Plug-ins of earlier releases import the changes of a scenario, and what a workload gets, by these names."""
    from dtypedoctor.lab.trials import changes
    from dtypedoctor.trials import remedies

    assert remedies.with_model is changes.with_model
    shim = (Path(__file__).parents[2] / "dtypedoctor" / "workloads" / "context.py").read_text()
    assert "from dtypedoctor.lab.workloads.context import *" in shim
