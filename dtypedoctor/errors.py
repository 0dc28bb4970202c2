"""Errors that a user can act on, and the exit codes of the command line."""

import sys
from collections.abc import Iterable
from enum import IntEnum
from importlib.util import find_spec


class ExitCode(IntEnum):
    """What the command line's exit codes mean."""

    OK = 0
    """Nothing wrong; or a scenario failed as it says it does and was cured as it says it is."""
    INTERNAL = 1
    """dtypedoctor itself failed."""
    USAGE = 2
    """Wrong usage, or an input that cannot be read."""
    NO_TRACE = 3
    """The worker left no usable trace."""
    FINDINGS = 10
    """Findings remain."""


INTERRUPTED = 130
"""Status of a command that Ctrl-C has ended, as that of any other program."""


class DoctorError(Exception):
    """Base of the errors that end a command with one message and no traceback.

    Args:
        message: what is wrong, with its place where there is one (``file:line:column: …``). May span several lines.
        hint: what to do next, or an empty string.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DoctorError):
    """The user's input cannot be used (exit 2)."""

    exit_code = ExitCode.USAGE


class EmptyTraceError(UsageError):
    """What the user names is the run of a worker that died before it left a whole record (exit 3)."""

    exit_code = ExitCode.NO_TRACE


class WorkerDiedError(DoctorError):
    """A worker ended without leaving a usable trace (exit 3)."""

    exit_code = ExitCode.NO_TRACE


class NodeLostError(UsageError):
    """The machines on which something was to run were lost again and again, so nothing is known of it (exit 3)."""

    exit_code = ExitCode.NO_TRACE


INSTALL_HF = "Install them: pip install 'dtypedoctor[hf]'"
"""The extra that holds the Hugging Face libraries and bitsandbytes."""


def is_installed(package: str) -> bool:
    """Whether ``package``, a top-level name, can be imported; it is not imported for that."""
    try:
        return package in sys.modules or find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def require_installed(what: str, packages: Iterable[str]) -> None:
    """Checks that the libraries which ``what`` needs are there, without importing them.

    Raises:
        UsageError: at least one of ``packages`` is not installed.
    """
    missing = [package for package in dict.fromkeys(packages) if not is_installed(package)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(f"{what} needs {', '.join(missing)}, which {verb} not installed", INSTALL_HF)
