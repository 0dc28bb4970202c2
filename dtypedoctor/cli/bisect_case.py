"""What ``bisect`` is asked to do: a new case, or one that was interrupted."""

from dataclasses import dataclass, replace
from pathlib import Path

from dtypedoctor.cli.foreign_code import allow_directory
from dtypedoctor.cli.scenario_files import load_checked
from dtypedoctor.diagnosis.checkpoint import cached
from dtypedoctor.errors import UsageError
from dtypedoctor.runner.directories import new_directory
from dtypedoctor.scenario.loading import case_of, override, resolve
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trials.bisection.laboratory import Asked, Journal

__all__ = ["Case", "Options", "new_case", "resumed_case"]

DTYPE = "float16"
"""The dtype under suspicion where neither a scenario nor an option names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says about the case; None where it says nothing."""

    scenario: str | None = None
    model: str | None = None
    dtype: str | None = None
    workload: str | None = None
    device: str | None = None
    out: Path | None = None
    tolerance: float | None = None
    time_limit: int | None = None
    allow_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A bisection to do.

    Attributes:
        directory: its run directory, which exists.
        resumed: whether something lies there already.
    """

    asked: Asked
    directory: Path
    resumed: bool


def new_case(options: Options) -> Case:
    """A case in a new run directory.

    Raises:
        UsageError: the options contradict each other, the scenario cannot be read, or the directory cannot be made.
    """
    scenario = override(_scenario(options), device=options.device)
    if options.time_limit is not None:
        scenario = scenario.with_changes(time_limit=options.time_limit)
    if options.tolerance is not None and not 0 < options.tolerance < float("inf"):
        raise UsageError("--tolerance must be a number above 0", "It is a difference of log-probabilities, e.g. 0.05.")
    asked = Asked(scenario=scenario, tolerance=options.tolerance)
    directory = new_directory(options.out, f"bisect-{scenario.name}")
    Journal(directory).begin(asked)
    return Case(asked=asked, directory=directory, resumed=False)


def resumed_case(directory: Path, beside: Options) -> Case:
    """The case whose run directory this is.

    Raises:
        UsageError: another option wants something else, there is no bisection in the directory, or it is a stranger's and may not
            run code.
    """
    if replace(beside, allow_code=False) != Options():
        raise UsageError("--resume goes on as it began", "Give it alone, or with --jobs and --allow-code.")
    asked = Journal(directory).asked()
    allow_directory(directory, allowed=beside.allow_code)
    return Case(asked=asked, directory=directory, resumed=True)


def _scenario(options: Options) -> Scenario:
    if (options.scenario is None) == (options.model is None):
        raise UsageError(
            "give either a SCENARIO or --model", "For example: dtypedoctor bisect --model builtin:gemma4-tiny"
        )
    if options.model is not None:
        _require_weights(options.model)
        return case_of(options.model, options.dtype or DTYPE, options.workload)
    if options.workload is not None:
        raise UsageError("--workload is for --model: a scenario has its own", "Leave one of the two out.")
    assert options.scenario is not None  # one of the two is given
    return override(load_checked(resolve(options.scenario), allow_code=options.allow_code), dtype=options.dtype)


def _require_weights(model: str) -> None:
    """A hub id has to be in the cache: each of many runs loads the model anew, and none of them should wait for a network.

    Raises:
        UsageError: it is not.
    """
    if ":" not in model and not Path(model).exists() and cached(model) is None:
        raise UsageError(
            f"--model: {model} is neither a folder here nor a model id in the Hugging Face cache",
            "Give builtin:NAME, a folder, an id that has been downloaded, or package.module:factory.",
        )
