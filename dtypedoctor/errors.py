"""Errors that a user can act on, and the exit codes of the command line."""

from enum import IntEnum


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
