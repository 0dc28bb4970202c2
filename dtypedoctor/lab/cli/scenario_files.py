"""Loads scenario files for the verbs. Every id in them is checked against what the program has.

A scenario may name code, and a run directory that is resumed holds some: that of others runs only where the user says so.
"""

import ctypes
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.diagnosis import typed_ids
from dtypedoctor.errors import UsageError, require_installed
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.interruptions import say
from dtypedoctor.lab.scenarios.loading import is_shipped, load_scenario, require_builtin
from dtypedoctor.lab.scenarios.model import Plugin, Scenario, ScenarioStep, Script
from dtypedoctor.plugins import BUILTIN, Correction, Model, Workload, known, registered
from dtypedoctor.replay.capsule import ALLOW_CODE, MODEL, Capsule
from dtypedoctor.replay.own import is_own
from dtypedoctor.text import did_you_mean, one_line

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

    Capsules are made to be sent around, so wherever it lies, its code is not taken for the user's own, unless it is marked as such.

    Returns:
        Whether it may run code.

    Raises:
        UsageError: it holds code, and nobody has said yes.
    """
    named = [one_line(name, 100) for name in capsule.code()]
    if not named or allowed or is_own(capsule.directory):
        return bool(named) or allowed
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


def require_at_hand(scenario: Scenario) -> None:
    """Refuse what is certainly missing before a worker imports torch and the trainers, which takes ten seconds; the worker says the rest.

    Raises:
        UsageError: there is no such device, builtin model or workload, or a library is missing.
    """
    if scenario.device == "cuda" and (why := why_no_cuda()):
        raise UsageError(f"this scenario needs a CUDA device and there is none: {why}", "Run it with `--device cpu`.")
    for step in scenario.steps:
        if step.model is not None:
            require_builtin(step.model.name)
        name = step.workload.name if isinstance(step.workload, Plugin) else step.workload.kind
        workload = registered(Workload).get(name)
        if isinstance(step.workload, Plugin) and workload is None:
            meant = did_you_mean(name, registered(Workload))
            raise UsageError(f"there is no workload {name!r}{meant}", known(Workload))
        if scenario.requires:  # a worker imports from other places, too
            continue
        if workload is not None:
            require_installed(f"the workload {name}", workload.needs)
        if step.model is not None:
            require_installed(step.model.name, _libraries_of(step))


def _libraries_of(step: ScenarioStep) -> Iterator[str]:
    """The packages that a model, its packed weights and its adapters need beside torch."""
    model = step.model
    assert model is not None
    if model.name.startswith(BUILTIN):
        yield from registered(Model)[model.name.removeprefix(BUILTIN)].needs
    elif os.path.exists(model.name) or ":" not in model.name:  # a folder or a hub id: `from_pretrained(device_map=…)`
        yield from ("transformers", "accelerate")
    if model.device_map is not None:
        yield "accelerate"
    if model.quantization is not None:
        yield "bitsandbytes"
    if model.lora is not None:
        yield "peft"


def why_no_cuda() -> str:
    """Say why torch cannot have a CUDA device here; empty where it may have one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all"
    version = _version_of_torch()
    if re.search(r"^hip\b.*= *['\"]", version, re.MULTILINE):
        return ""  # torch calls AMD's devices by the same name
    if re.search(r"^cuda\b.*= *None", version, re.MULTILINE):
        return "the installed torch is built without CUDA"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed" if sys.platform == "linux" else ""
    return ""


def _version_of_torch() -> str:
    """Read ``torch/version.py``, which says what torch was built for, without importing torch; empty where it is not found."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            return Path(folder, "version.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    return ""
