"""Static checks of the checkpoints that a scenario names, before anything runs."""

from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.diagnosis import preflight
from dtypedoctor.diagnosis.checkpoint import is_checkpoint, read_checkpoint
from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.subject import Intent
from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.model import Scenario, Script

__all__ = ["check_checkpoints", "joined"]


def check_checkpoints(scenario: Scenario) -> tuple[Finding, ...]:
    """What stands out in the local folders that the scenario loads, or that are among a script's arguments.

    Mere information is left out: it says nothing about a run. A folder that cannot be read is left to the run to complain of.
    """
    found: list[Finding] = []
    for path, intent in dict(_checkpoints(scenario)).items():
        try:
            found += preflight(read_checkpoint(path, intent))
        except UsageError:
            continue
    return tuple(finding for finding in found if finding.severity is not Severity.INFO)


def joined(dynamic: tuple[Finding, ...], static: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """What a run showed, then what its files showed beforehand; what both showed is said once."""
    known = {finding.id for finding in dynamic}
    extra = tuple(finding for finding in static if finding.id not in known)
    errors = tuple(finding for finding in dynamic if finding.severity is Severity.ERROR)
    return (*errors, *extra, *(finding for finding in dynamic if finding.severity is not Severity.ERROR))


def _checkpoints(scenario: Scenario) -> Iterator[tuple[Path, Intent]]:
    for step in scenario.steps:
        if isinstance(step.workload, Script):
            for argument in step.workload.args:
                yield from (
                    (path, Intent()) for path in (Path(argument.partition("=")[2] or argument),) if _there(path)
                )
        elif step.model is not None and _there(Path(step.model.name)):
            yield Path(step.model.name), Intent(dtype=step.model.dtype, scaler=step.grad_scaler)


def _there(path: Path) -> bool:
    try:
        return path.is_dir() and is_checkpoint(path)
    except (OSError, ValueError):  # an argument that is no path at all
        return False
