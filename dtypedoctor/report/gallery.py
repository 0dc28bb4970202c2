"""The pictures of the runs that a run directory holds."""

from dataclasses import replace
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import inside
from dtypedoctor.report.distil import distil
from dtypedoctor.report.model import Outcome, Report
from dtypedoctor.report.picture import Picture
from dtypedoctor.trace.ranks import leading_directory
from dtypedoctor.trace.reader import Trace, read_trace

__all__ = ["with_pictures"]

BEFORE, CLOSER, REFERENCE = "before", "closer", "reference"


def with_pictures(report: Report, directory: Path) -> Report:
    """``report`` with a picture of the run before, of the first remedy that fixes, and of the reference.

    Args:
        report: the report of the run in ``directory``.
        directory: holds one trace directory per run: ``before``, ``closer`` (the same failure with the op trace on),
            ``remedy-ID`` and ``reference``. A run that left no trace is passed over.
    """
    cures = [trial.remedy for trial in report.trials if trial.outcome is Outcome.FIXED]
    wanted = {BEFORE: BEFORE, **{f"remedy-{remedy}": remedy for remedy in cures[:1]}, REFERENCE: REFERENCE}
    pictures = (_picture(directory, name, label) for name, label in wanted.items())
    return replace(report, pictures=tuple(picture for picture in pictures if picture is not None))


def _picture(directory: Path, name: str, label: str) -> Picture | None:
    trace = _trace(directory, name)
    if trace is None:
        return None
    return distil(trace, label, ops_from=_trace(directory, CLOSER) if name == BEFORE else None)


def _trace(directory: Path, name: str) -> Trace | None:
    try:
        return read_trace(leading_directory(inside(directory, name)))
    except (UsageError, OSError):  # a run that was not tried, or whose trace was deleted to save space
        return None
