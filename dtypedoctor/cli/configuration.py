"""Defaults of a project: the table ``[tool.dtypedoctor]`` of the nearest ``pyproject.toml``.

Each key is an option without its dashes. What the table says is put behind the verb, before what was typed, so that the command line wins and every report
shows the whole command. Only options that change what is measured or printed can be set: a project from somebody else must not allow code to run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError

FILE = "pyproject.toml"
RUNS = "runs"
"""The key that is no option: the folder in which run directories are made."""
RUNS_VARIABLE = "DTYPEDOCTOR_RUNS"
KEYS = (
    "capsule-limit",
    "overhead-budget",
    "every-n-steps",
    "time-limit",
    "verify-uninstrumented",
    "propagate-exit",
    "device",
    "format",
)
"""The options that can be set."""
_EXCLUSIVE = (("every-n-steps", "overhead-budget"),)


def with_project_defaults(words: Sequence[str], options_of: Callable[[str], Sequence[str]]) -> list[str]:
    """The command line with the defaults of the project in it.

    Args:
        words: what was typed, without the program: the verb first.
        options_of: the options of a verb, as they are typed; asked only where there is a table.

    Raises:
        UsageError: the table has a key or a value that cannot be used, or the file is no TOML.
    """
    path = _nearest(Path.cwd()) if words else None
    if path is None:
        return list(words)
    verb, *rest = words
    settings = _settings(path)
    if RUNS in settings:
        os.environ.setdefault(RUNS_VARIABLE, str(path.parent / str(settings[RUNS])))
    options = options_of(verb)
    replaced = _replaced(rest)
    usable = {key: value for key, value in settings.items() if f"--{key}" in options and key not in replaced}
    return [verb, *_as_options(path, usable), *rest]


def _replaced(words: Sequence[str]) -> set[str]:
    """The keys that what was typed excludes."""
    typed = {word.partition("=")[0].removeprefix("--") for word in words}
    return {key for pair in _EXCLUSIVE if typed.intersection(pair) for key in pair}


def _nearest(folder: Path) -> Path | None:
    """The ``pyproject.toml`` of ``folder`` or the nearest one above it that has such a table."""
    for place in (folder, *folder.parents):
        path = place / FILE
        try:
            if b"[tool.dtypedoctor]" in path.read_bytes():
                return path
        except OSError:
            continue
    return None


def _settings(path: Path) -> dict[str, Any]:
    """The table.

    Raises:
        UsageError: the file is no TOML, or a key is unknown.
    """
    import tomllib

    from dtypedoctor.scenario.problems import did_you_mean

    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["dtypedoctor"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}", "It must be TOML, in UTF-8.") from error
    known = (RUNS, *KEYS)
    for key in settings:
        if key not in known:
            meant = did_you_mean(key, known)
            raise UsageError(f"{path}: [tool.dtypedoctor]: unknown key {key!r}{meant}", f"Known: {', '.join(known)}.")
    return dict(settings)


def _as_options(path: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        if value is True:
            yield f"--{key}"
        elif isinstance(value, (str, int, float)) and value is not False:
            yield f"--{key}={value}"
        elif value is not False:
            raise UsageError(f"{path}: [tool.dtypedoctor]: {key} must be text, a number, true or false, got {value!r}")
