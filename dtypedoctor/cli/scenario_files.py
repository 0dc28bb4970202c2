"""Loads scenario files for the verbs. Every id in them is checked against what the program has.

A scenario may name code, and a run directory that is resumed holds some: that of others runs only where the user says so.
"""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.diagnosis.registry import typed_ids
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say
from dtypedoctor.plugins import Correction, registered
from dtypedoctor.replay.capsule import ALLOW_CODE, MODEL, Capsule
from dtypedoctor.report.text import one_line
from dtypedoctor.scenario.loading import is_shipped, load_scenario
from dtypedoctor.scenario.model import Scenario, Script
from dtypedoctor.trials.remedies import remedies

_YES = ("y", "yes")


def allow_scenario(scenario: Scenario, path: Path, *, allowed: bool) -> None:
    """Lets a scenario pass that runs no code of its own, that is the user's, or that is allowed to.

    Raises:
        UsageError: it is from elsewhere and names code, and nobody has said yes.
    """
    named = list(_code_of(scenario))
    if named and not allowed and not is_shipped(path):
        _ask(path, f"this scenario runs code: {', '.join(named)}")


def allow_directory(directory: Path, *, allowed: bool) -> None:
    """Lets a run directory pass that the user has made, or that is allowed to run code.

    What is resumed becomes a script that is run (``repro.py``), whatever the scenario in it names.

    Raises:
        UsageError: it is from elsewhere, and nobody has said yes.
    """
    if not allowed:
        _ask(directory, "resuming runs code from this directory")


def allow_capsule(capsule: Capsule, *, allowed: bool) -> bool:
    """Lets a capsule pass that names only what is known of torch and its libraries, or that is allowed to run code.

    Capsules are made to be sent around, so wherever it lies, its code is not taken for the user's own.

    Returns:
        Whether it may run code.

    Raises:
        UsageError: it holds code, and nobody has said yes.
    """
    named = [one_line(name, 100) for name in capsule.code()]
    if not named or allowed:
        return allowed
    what = f"replaying runs code: {', '.join(named[:5])}"
    if not _says_yes(f"{one_line(str(capsule.directory), 400)}: {what}\nRun it? [y/N] "):
        raise UsageError(f"{one_line(str(capsule.directory), 400)}: {what}", ALLOW_CODE)
    return True


def _says_yes(question: str) -> bool:
    """Whether somebody at a terminal agrees."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(question, end="")
    return sys.stdin.readline().strip().lower() in _YES


def resume_command(directory: Path) -> str:
    """What goes on with the bisection in a directory that this user has made."""
    option = "" if _is_the_users(directory) else " --allow-code"
    return f"dtypedoctor bisect --resume {shlex.quote(str(directory))}{option}"


def _code_of(scenario: Scenario) -> Iterator[str]:
    """What the scenario runs that is no part of dtypedoctor, at its place in the file."""
    for number, step in enumerate(scenario.steps):
        name = step.model.name if step.model is not None else ""
        if name.startswith(MODEL):  # whatever lies there: it may say that its code is allowed
            yield f"the capsule {one_line(name.removeprefix(MODEL))} (steps[{number}].model.name)"
        elif ":" in name and not name.startswith("builtin:") and not os.path.exists(name):
            yield f"the model factory {one_line(name)} (steps[{number}].model.name)"
        if isinstance(step.workload, Script):
            script = step.workload.path or step.workload.module or "in its source text"
            yield f"the script {one_line(str(script))} (steps[{number}].workload)"


def _is_the_users(path: Path) -> bool:
    """Whether it lies below the working directory, and it and all folders between are the user's."""
    here, place = Path.cwd().resolve(), path.resolve()
    if not place.is_relative_to(here):
        return False
    try:
        between = [place, *(folder for folder in place.parents if folder.is_relative_to(here) and folder != here)]
        return all(one.stat().st_uid == os.getuid() for one in between)
    except OSError:
        return False


def _ask(path: Path, what: str) -> None:
    if _is_the_users(path):
        return
    shown = one_line(str(path), 400)
    if _says_yes(f"{shown}: {what}\nIt is not below this directory, or not yours. Run it? [y/N] "):
        return
    raise UsageError(
        f"{shown}: {what}",
        "Read it first, then pass --allow-code; files of your own below the working directory need no option.",
    )


def load_checked(path: Path, *, allow_code: bool) -> Scenario:
    """The scenario of a file.

    Args:
        path: the file.
        allow_code: let a scenario from elsewhere name code.

    Raises:
        UsageError: the file cannot be read, or holds mistakes; an unknown id of a finding, a remedy or a correction is one.
            Or it is from elsewhere and names code.
    """
    known = {"finding": typed_ids(), "remedy": remedies(), "correction": registered(Correction)}
    scenario = load_scenario(path, known)
    allow_scenario(scenario, path, allowed=allow_code)
    return scenario
