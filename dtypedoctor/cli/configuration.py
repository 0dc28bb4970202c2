"""Defaults of a project: the table ``[tool.dtypedoctor]`` of the nearest ``pyproject.toml``.

Each key is an option without its dashes. What the table says is put behind the verb, before what was typed, so that the command line wins and every report
shows the whole command. Only options that change what is measured or printed can be set: a project from somebody else must not allow code to run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtypedoctor.cli.output import current_name
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import read_head

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
_REPLACES = {
    "every-n-steps": ("overhead-budget",),
    "overhead-budget": ("every-n-steps",),
    "resume": KEYS,
}
"""The keys that do not count where an option is typed that cannot stand beside them."""
_TABLE = b"[tool.dtypedoctor]"
_LARGEST = 1 << 20
"""Bytes of a ``pyproject.toml``, which every verb reads."""


def with_project_defaults(words: Sequence[str], options_of: Callable[[str], Mapping[str, bool]]) -> list[str]:
    """The command line with the defaults of the project in it.

    Args:
        words: what was typed, without the program: the verb first.
        options_of: the options of a verb, as they are typed, and whether each is a flag; asked only where there is a table.

    Raises:
        UsageError: the table has a key or a value that cannot be used, or the file is no TOML.
    """
    found = _nearest() if words and not words[0].startswith("-") else None
    if found is None:
        return list(words)
    path, settings = found
    verb, *rest = words
    if RUNS in settings:
        os.environ.setdefault(RUNS_VARIABLE, str(path.parent / settings[RUNS]))
    options = options_of(verb)
    replaced = _replaced(rest, options)
    usable = {key: value for key, value in settings.items() if f"--{key}" in options and key not in replaced}
    return [verb, *_as_options(path, usable, options), *rest]


def _replaced(words: Sequence[str], options: Mapping[str, bool]) -> set[str]:
    """The keys that what was typed excludes."""
    typed = {current_name(word.partition("=")[0].removeprefix("--")) for word in words if word.startswith("--")}
    return {key for name in typed if f"--{name}" in options for key in _REPLACES.get(name, ())}


def _nearest() -> tuple[Path, dict[str, Any]] | None:
    """The ``pyproject.toml`` of the working directory or the nearest one above it that has such a table, and the table."""
    try:
        folder = Path.cwd()
        owners = {0, os.getuid(), folder.stat().st_uid}
    except OSError:  # the directory was removed
        return None
    for place in (folder, *folder.parents):
        path = place / FILE
        try:
            # In a folder that others can write to, such as /tmp, it would decide where their neighbors' runs are kept.
            content = read_head(path, _LARGEST + 1, follow=True) if path.stat().st_uid in owners else b""
        except OSError:  # there is none, or it is no regular file
            continue
        if _TABLE in content and len(content) > _LARGEST:
            raise UsageError(f"{path}: larger than {_LARGEST >> 20} MiB", "Settings are a few lines; make it smaller.")
        settings = _settings(path, content) if _TABLE in content else None
        if settings is not None:
            return path, settings
    return None


def _settings(path: Path, content: bytes) -> dict[str, Any] | None:
    """The table; None where it is only mentioned, in a comment or a text.

    Raises:
        UsageError: the file is no TOML, or a key is unknown.
    """
    import tomllib

    from dtypedoctor.text import did_you_mean

    try:
        tool = tomllib.loads(content.decode("utf-8")).get("tool")
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path}: cannot be read: {why}", "It must be TOML, in UTF-8.") from None
    settings = tool.get("dtypedoctor") if isinstance(tool, dict) else None
    if not isinstance(settings, dict):
        return None
    known = (RUNS, *KEYS)
    for key in settings:
        if key not in known:
            meant = did_you_mean(key, known)
            raise UsageError(f"{path}: [tool.dtypedoctor]: unknown key {key!r}{meant}", f"Known: {', '.join(known)}.")
    if not isinstance(runs := settings.get(RUNS, ""), str) or "\0" in runs:
        raise UsageError(f"{path}: [tool.dtypedoctor]: {RUNS} must be text, got {runs!r}"[:400])
    return settings


def _as_options(path: Path, settings: Mapping[str, Any], options: Mapping[str, bool]) -> Iterator[str]:
    for key, value in settings.items():
        if options[f"--{key}"]:
            if not isinstance(value, bool):
                raise UsageError(f"{path}: [tool.dtypedoctor]: {key} must be true or false, got {value!r}")
            yield from [f"--{key}"] if value else []
        elif value is True or not isinstance(value, (str, int, float)):
            raise UsageError(f"{path}: [tool.dtypedoctor]: {key} must be text or a number, got {value!r}")
        elif value is not False:
            yield f"--{key}={value}"
