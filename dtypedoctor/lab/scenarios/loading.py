"""From what is typed at the prompt to a Scenario: finds the file, reads it, applies options; or makes one for a model.

A file's mistakes are reported all at once, each with its place.
"""

import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtypedoctor import plugins
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.model import Model, Scenario
from dtypedoctor.lab.scenarios.reading import in_words, read_scenario, refusal
from dtypedoctor.plugins import BUILTIN, switched_off
from dtypedoctor.text import did_you_mean, printable, quoted

_PACKAGE = Path(__file__).resolve().parents[2]


def available() -> tuple[Path, ...]:
    """The files of all shipped scenarios, sorted by name.

    A wheel holds them inside the package. An editable install and a source checkout have them beside the package.
    """
    found: dict[str, Path] = {}
    for directory in _directories(_PACKAGE):
        for path in directory.glob("*.yaml"):
            found.setdefault(path.stem, path)
    return tuple(found[name] for name in sorted(found))


def shipped_beside(text: str) -> Path | None:
    """The folder of further shipped scenarios, or the file in it, meant by ``scenarios/real`` or ``real/NAME.yaml``; None if there is none."""
    name = text.removeprefix("scenarios/").rstrip("/")
    if not re.fullmatch(r"[a-z]+(/[a-z0-9_]+\.yaml)?", name):
        return None
    found = (directory / name for directory in _directories(_PACKAGE))
    return next((path for path in found if path.is_file() or any(path.glob("*.yaml"))), None)


def is_shipped(path: Path) -> bool:
    """Whether a file came with this package."""
    shipped = [*available(), *(one for top in _directories(_PACKAGE) for one in top.glob("*/*.yaml"))]
    return path.resolve() in {one.resolve() for one in shipped}


def resolve(text: str) -> Path:
    """The file that a person means: a path, or the bare name of a shipped scenario (``gemma4_grpo_fp16``).

    Raises:
        UsageError: there is neither such a file nor such a scenario.
    """
    path = Path(text)
    shipped = {scenario.stem: scenario for scenario in available()}
    if text in shipped and not _is_file(path):
        return shipped[text]
    if not text or not _exists(path):
        raise not_found(text)
    return path


def not_found(text: str) -> UsageError:
    """The error for a scenario that does not exist, naming the one that may be meant."""
    names = [path.stem for path in available()]
    suggestion = did_you_mean(Path(text).stem, names)
    what = printable(Path(text)) if text else quoted(text)
    return UsageError(
        f"{what}: no such file or scenario{suggestion}", f"Known scenarios: {', '.join(names)}" if names else ""
    )


def _directories(package: Path) -> list[Path]:
    directories = [package / "data" / "scenarios"]
    if (package.parent / "pyproject.toml").is_file():  # in site-packages, `scenarios` would be somebody else's
        directories.append(package.parent / "scenarios")
    return directories


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, a directory that may not be entered, a NUL
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return True  # opening it says what is wrong with it


LARGEST_FILE = 128 * 1024
"""Bytes. A scenario takes one or two thousand, and PyYAML about ten seconds for a million."""


def read_bytes(path: Path) -> bytes:
    """Read a regular file of moderate size.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it is no file, cannot be opened, or is too large.
    """
    try:
        if path.is_dir():
            names = sorted(printable(one) for one in path.glob("*.yaml"))
            hint = f"Give one of its files: {', '.join(names[:5])}" if names else "Give a YAML file."
            raise UsageError(f"{printable(path)}: this is a directory, not a scenario file", hint)
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{printable(path)}: this is not a regular file", "Give a YAML file.")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{printable(path)}: cannot be read: {reason}", "Check the path and its permissions."
        ) from error
    if len(data) > LARGEST_FILE:
        raise UsageError(f"{printable(path)}: larger than {LARGEST_FILE // 1024} KiB", "Is this a scenario file?")
    return data


_HINT = "docs/scenario-keys.md lists every key."


def load_scenario(path: Path, known: Mapping[str, Collection[str]] | None = None) -> Scenario:
    """Reads a scenario.

    Args:
        path: the file; its name without the ending is the scenario's name.
        known: ids that exist, by what they name (``finding``, ``remedy``, ``correction``); ids of the scenario that are
            not among them are mistakes. What is left out is checked for its form only.

    Raises:
        UsageError: the file cannot be read, or holds mistakes: one ``file:line:column: what is wrong`` a line, in the
            order of the file.
    """
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise not_found(str(path)) from None
    scenario, problems = read_scenario(data, path.stem, known or {})
    if problems or scenario is None:
        raise refusal(path, problems, f"{_HINT}{switched_off()}")
    # Scripts and folders of models that are not found from the working directory are those in the scenario's own
    folder = path.resolve().parent
    steps = scenario.model_dump()["steps"]
    for step in steps:
        if step["workload"]["kind"] == "script" and step["workload"]["path"] is not None:
            step["workload"]["path"] = _beside(step["workload"]["path"], folder)
        if step["model"] is not None and ":" not in step["model"]["name"]:
            step["model"]["name"] = _beside(step["model"]["name"], folder, "config.json")
    return scenario.with_changes(steps=steps)


def _beside(name: str, folder: Path, file: str = "") -> str:
    """The path from ``folder`` where there is such a file, or a folder with ``file``, and none in the working directory; else ``name``."""
    found = not _exists(Path(name)) and _is_file(folder / name / file if file else folder / name)
    return str(folder / name) if found else name


SETTINGS: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward"},
    "train": {"kind": "train", "steps": 4},
    "sft": {"kind": "sft", "steps": 4},
    "grpo": {"kind": "grpo", "steps": 4, "gradient_accumulation": 2},
    "generate": {"kind": "generate"},
}
"""Settings of a workload of which only the name was given; a shipped scenario that does the same keeps its own."""

_ONE_PASS = {"kind": "forward", "backward": True}
"""What is done where no workload was named."""


def case_of(model: str, dtype: str, workload: str | None = None) -> Scenario:
    """A scenario for ``model`` in ``dtype``.

    Without a workload it does what the shipped scenario of a builtin model does, and one forward and backward pass on random
    tokens with any other model. Nothing is expected of it.

    Raises:
        UsageError: the dtype or the workload is not one that a scenario could name.
    """
    if workload is not None and workload not in SETTINGS:
        meant = did_you_mean(workload, SETTINGS)
        raise UsageError(f"--workload: there is no workload {workload!r}{meant}", f"Known: {', '.join(SETTINGS)}.")
    shown_by = _case(model)
    shipped = load_scenario(resolve(shown_by)) if shown_by is not None else None
    step: dict[str, Any] = {"model": {"name": model, "dtype": dtype}, "workload": _ONE_PASS}
    if shipped is not None:
        step = shipped.model_dump()["steps"][0]
        step["model"]["dtype"] = dtype
    if workload is not None:
        own = step["workload"] if shipped is not None and step["workload"]["kind"] == workload else None
        step["workload"] = own or SETTINGS[workload]
    values: dict[str, Any] = {"name": _name(model), "summary": f"{model} in {dtype}.", "steps": [step]}
    if shipped is not None:
        values |= {"references": shipped.references, "seed": shipped.seed}
    try:
        return Scenario.model_validate(values)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
        raise UsageError(f"--{error['loc'][-1]}: {in_words(error)}") from refused


def _case(model: str) -> str | None:
    """The shipped scenario that shows what a builtin model is there for. Its random weights alone are too small to fail, so
    the outliers and adapters of the scenario are taken with it.
    """
    builtin = plugins.registered(plugins.Model).get(model.removeprefix(BUILTIN)) if model.startswith(BUILTIN) else None
    return builtin.case if builtin is not None else None


def _name(model: str) -> str:
    words = re.sub(r"[^a-z0-9_.-]+", "-", Path(model).name.lower() if ":" not in model else model.lower())
    return words.strip("-_.")[:100] or "model"


def override(
    scenario: Scenario,
    *,
    model: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    processes: int | None = None,
    device_map: str | None = None,
) -> Scenario:
    """The scenario with other values where one is given; ``model``, ``dtype`` and ``device_map`` go to every model in it.

    Outliers and options belong to the builtin model for which they were written, so another model is taken without them.

    Raises:
        UsageError: a value is not one that the scenario's file could hold.
    """
    given = {"device": device, "seed": seed}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if processes is not None:
        changes["distributed"] = _distributed(scenario) | {"processes": processes}
    changes["steps"] = [
        step.model_dump() | ({"model": _changed(step.model, model, dtype, device_map)} if step.model else {})
        for step in scenario.steps
    ]
    try:
        return scenario.with_changes(**changes)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
        option = str(error["loc"][-1]).replace("_", "-") if error["loc"] else "nproc-per-node"
        raise UsageError(f"--{option}: {in_words(error)}") from refused


def _distributed(scenario: Scenario) -> dict[str, Any]:
    return scenario.distributed.model_dump() if scenario.distributed is not None else {}


def _changed(model: Model, name: str | None, dtype: str | None, device_map: str | None) -> dict[str, Any]:
    values = model.model_dump()
    if name is not None and name != model.name:
        values |= {"name": name, "outliers": [], "options": {}}
    values |= {key: value for key, value in {"dtype": dtype, "device_map": device_map}.items() if value is not None}
    return values


def json_schema() -> dict[str, Any]:
    """The schema in draft 2020-12, with each key's description and default.

    It accepts every file that ``load_scenario`` accepts. It cannot say what depends on several keys (a script has either
    ``path`` or ``module``; the name is the file's), so the loader has the last word.
    """
    schema = Scenario.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:dtypedoctor:schema:scenario:1",
        **schema,
        "title": "dtypedoctor scenario",
    }


def require_builtin(name: str) -> None:
    """Refuse the name of a builtin model that nobody has registered, or that lacks its prefix.

    Raises:
        UsageError: there is none of that name.
    """
    short, models = name.removeprefix(BUILTIN), plugins.registered(plugins.Model)
    if name in models and not os.path.exists(name):
        raise UsageError(f"cannot load the model {name!r}; did you mean '{BUILTIN}{name}'?")
    if name != short and short not in models:
        meant = did_you_mean(short, models)
        raise UsageError(f"there is no builtin model {short!r}{meant}", plugins.known(plugins.Model, BUILTIN))
