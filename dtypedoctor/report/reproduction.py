"""What somebody else needs to see the same: the scenario as YAML and a script that runs it."""

import shlex
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from dtypedoctor import __version__
from dtypedoctor.report.model import Report
from dtypedoctor.report.to_json import plain
from dtypedoctor.scenario.dump import to_yaml
from dtypedoctor.scenario.model import Scenario

__all__ = ["reproduction_script", "scenario_yaml"]


def scenario_yaml(report: Report) -> str:
    """The scenario of ``report`` as YAML; empty where the report carries none."""
    values = plain(report.scenario)
    if not values:
        return ""
    try:
        return to_yaml(Scenario.model_validate(values))
    except ValidationError:  # a report may be older than the scenario's present keys, or redacted
        text: str = yaml.safe_dump(values, sort_keys=False, width=100)
        return text


def reproduction_script(report: Report) -> str:
    """A POSIX shell script that installs the recorded versions and runs the scenario; empty without a scenario."""
    scenario = scenario_yaml(report)
    if not scenario:
        return ""
    end = "END_OF_SCENARIO"
    while end in scenario:  # a here-document ends at the first line that is its mark
        end += "_"
    requirements = " ".join(shlex.quote(item) for item in _requirements(report.environment))
    return "\n".join(
        (
            "#!/bin/sh",
            "set -eu",
            "python3 -m venv reproduce && . reproduce/bin/activate",
            f"pip install {requirements}",
            f"cat > scenario.yaml <<'{end}'",
            scenario.rstrip("\n"),
            end,
            "dtypedoctor run scenario.yaml",
            "",
        )
    )


def _requirements(environment: Mapping[str, Any]) -> list[str]:
    versions = environment.get("versions")
    found = versions if isinstance(versions, Mapping) else {}
    # A local label such as +cpu or +cu128 names a build that the package index does not have.
    return [
        f"dtypedoctor=={__version__}",
        *(f"{name}=={str(version).split('+')[0]}" for name, version in found.items()),
    ]
