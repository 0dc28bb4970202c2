"""Static checks of checkpoints and models before anything runs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.diagnosis import preflight
from dtypedoctor.diagnosis.checkpoint import Intent, Subject, cached, is_checkpoint, noted, read_checkpoint
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.errors import UsageError, WorkerDiedError
from dtypedoctor.foreign_files import reason
from dtypedoctor.runner.launch import Launcher
from dtypedoctor.scenario.model import Model, Request, Scenario, ScenarioStep, Script, Unload


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


def subject_of(model: str, intent: Intent) -> Subject:
    """The model: from its files, or built by a worker where it has none.

    Raises:
        UsageError: there is no such model.
        WorkerDiedError: the worker died while it built the model.
    """
    path = Path(model)
    try:
        if path.exists() or is_checkpoint(path):
            return read_checkpoint(path, intent)
    except OSError as error:
        raise UsageError(f"{model}: cannot be read ({reason(error)})", "Check the path and its permissions.") from error
    if ":" in model:
        return _built(model, intent)
    snapshot = cached(model)
    if snapshot is None:
        raise UsageError(
            f"{model}: neither a checkpoint nor a model in the Hugging Face cache",
            "Use a directory, a downloaded hub id, or builtin:NAME.",
        )
    return read_checkpoint(snapshot, intent)


def _built(model: str, intent: Intent) -> Subject:
    scenario = Scenario(
        name="inspect",
        summary="Builds a model.",
        device="cpu",
        steps=[
            ScenarioStep(
                model=Model.model_validate({"name": model, "dtype": intent.dtype or "float32"}),
                workload=Unload(kind="unload"),
            )
        ],
    )
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder) / "server.log") as launcher:
        run = launcher.run(Request(scenario=scenario), Path(folder) / "built")
    if run.died:
        raise WorkerDiedError(f"{model}: the worker {run.last_words()} while building the model")
    return noted(model, run.trace, intent)
