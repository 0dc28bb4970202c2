"""What a worker says about the machine that it runs on."""

from pathlib import Path

import pytest
import torch
from torch.utils import collect_env

from dtypedoctor.redaction.secrets import ALLOWED_VARIABLES
from dtypedoctor.worker import environment
from dtypedoctor.worker.environment import PACKAGES, VARIABLES, describe_environment, survey


def test_every_recorded_variable_may_stand_in_a_public_report() -> None:
    """What the worker records and redaction then hides would only say that there is something."""
    assert set(VARIABLES) <= ALLOWED_VARIABLES


def test_packages_that_are_not_installed_are_left_out() -> None:
    """A version for each that is there, nothing for the others."""
    versions = describe_environment(torch.device("cpu"))["versions"]
    assert versions["torch"] == torch.__version__
    assert set(versions) < set(PACKAGES)


def test_the_driver_is_read_where_linux_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is unknown where it does not."""
    assert describe_environment(torch.device("cpu"))["driver"] is None or environment.DRIVER.exists()
    (tmp_path / "version").write_text("580.95.05\n")
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
    assert describe_environment(torch.device("cpu"))["driver"] == "580.95.05"


def test_a_failure_of_torchs_own_tool_costs_its_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts a dozen programs; what goes wrong there is said in its place."""

    def fails() -> None:
        raise OSError("lscpu: no such program")

    monkeypatch.setattr(collect_env, "get_env_info", fails)
    found = survey()
    assert found["collect_env"] == {"error": "OSError: lscpu: no such program"}
    assert found["versions"]["torch"] == torch.__version__
