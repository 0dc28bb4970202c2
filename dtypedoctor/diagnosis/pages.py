"""Finds the page that explains a finding."""

from pathlib import Path

from dtypedoctor.diagnosis.ids import FAMILIES, FINDING_IDS
from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.scenario.problems import quoted
from dtypedoctor.scenario.suggestions import did_you_mean

__all__ = ["folder", "page"]

_PACKAGE = Path(__file__).resolve().parents[1]


def page(finding_id: str) -> str:
    """The Markdown text of the page about ``finding_id``, front matter included.

    Raises:
        UsageError: there is no such finding.
        DoctorError: the program was installed without its pages.
    """
    if finding_id not in FINDING_IDS:
        raise _unknown(finding_id)
    path = folder() / f"{finding_id}.md"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _not_installed() from error


def folder(package: Path = _PACKAGE) -> Path:
    """The folder with the pages that belongs to the installed ``package``.

    A wheel holds them inside the package; an editable install and a source checkout have them in ``docs`` beside it.

    Raises:
        DoctorError: there are no pages.
    """
    packed = package / "data" / "findings"
    if packed.is_dir():
        return packed
    beside = package.parent / "docs" / "findings"
    # in site-packages a folder called `docs` would be somebody else's
    if beside.is_dir() and (package.parent / "pyproject.toml").is_file():
        return beside
    raise _not_installed()


def _unknown(finding_id: str) -> UsageError:
    ids = [finding for family in FAMILIES.values() for finding in family]
    message = f"{quoted(finding_id)}: no such finding{did_you_mean(finding_id, ids)}"
    return UsageError(message, f"Known findings: {', '.join(ids)}")


def _not_installed() -> DoctorError:
    return DoctorError("the pages about findings are missing from this installation", "Install dtypedoctor again.")
