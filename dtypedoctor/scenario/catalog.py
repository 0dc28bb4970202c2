"""Finds the scenarios that are shipped with the program."""

from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.problems import printable, quoted
from dtypedoctor.scenario.suggestions import did_you_mean

__all__ = ["available", "not_found", "resolve"]

_PACKAGE = Path(__file__).resolve().parents[1]


def available() -> tuple[Path, ...]:
    """The files of all shipped scenarios, sorted by name.

    A wheel holds them inside the package. An editable install and a source checkout have them beside the package.
    """
    found: dict[str, Path] = {}
    for directory in _directories(_PACKAGE):
        for path in directory.glob("*.yaml"):
            found.setdefault(path.stem, path)
    return tuple(found[name] for name in sorted(found))


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
