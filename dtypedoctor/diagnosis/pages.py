"""Finds the page that explains a finding."""

from pathlib import Path

from dtypedoctor.diagnosis.registry import finding_ids, spec_of, typed_ids
from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.scenario.problems import quoted
from dtypedoctor.scenario.suggestions import did_you_mean

__all__ = ["folder", "page"]

_PACKAGE = Path(__file__).resolve().parents[1]


def page(finding_id: str) -> str:
    """The Markdown text of the page about ``finding_id``, an id or an alias, front matter included.

    Raises:
        UsageError: there is no such finding.
        DoctorError: the program was installed without its pages.
    """
    if finding_id not in typed_ids():
        raise _unknown(finding_id)
    spec = spec_of(finding_id)
    path = spec.page or folder() / f"{spec.id}.md"
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
    message = f"{quoted(finding_id)}: no such finding{did_you_mean(finding_id, typed_ids())}"
    return UsageError(message, f"Known findings: {', '.join(finding_ids())}")


def _not_installed() -> DoctorError:
    return DoctorError("the pages about findings are missing from this installation", "Install dtypedoctor again.")
