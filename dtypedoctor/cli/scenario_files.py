"""Loads scenario files for the verbs: every id in them is held against what the program has."""

from pathlib import Path

from dtypedoctor.cli.foreign_code import allow_scenario
from dtypedoctor.diagnosis.registry import typed_ids
from dtypedoctor.plugins import Correction, registered
from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trials.remedies import remedies

__all__ = ["load_checked"]


def load_checked(path: Path, *, allow_code: bool) -> Scenario:
    """The scenario of a file.

    Args:
        path: the file.
        allow_code: let a stranger's scenario name code.

    Raises:
        UsageError: the file cannot be read, or holds mistakes; an unknown id of a finding, a remedy or a correction is one.
            Or it is a stranger's and names code.
    """
    known = {"finding": typed_ids(), "remedy": remedies(), "correction": registered(Correction)}
    scenario = load_scenario(path, known)
    allow_scenario(scenario, path, allowed=allow_code)
    return scenario
