"""Finds what ``inspect`` is to look at."""

import tempfile
from pathlib import Path

from dtypedoctor.diagnosis.checkpoint import cached, is_checkpoint, read_checkpoint
from dtypedoctor.diagnosis.subject import Intent, Subject, noted
from dtypedoctor.errors import UsageError, WorkerDiedError
from dtypedoctor.foreign_files import reason
from dtypedoctor.runner.launch import Launcher
from dtypedoctor.scenario.model import Model, Scenario, ScenarioStep, Unload
from dtypedoctor.scenario.request import Request


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
            f"{model}: neither a checkpoint here nor a model id in the Hugging Face cache",
            "Give a folder, an id that has been downloaded, or builtin:NAME.",
        )
    return read_checkpoint(snapshot, intent)


def _built(model: str, intent: Intent) -> Subject:
    scenario = Scenario(
        name="inspect",
        summary="Builds a model and lets it go.",
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
        raise WorkerDiedError(f"{model}: the worker {run.last_words()} while it built the model")
    return noted(model, run.trace, intent)
