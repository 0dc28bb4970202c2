"""The request of a run on disk: what anybody may read, and, where that is not all, the whole for the worker alone.

A script gets its arguments as they were typed, tokens included. ``request.json`` holds them masked and stays; what the worker needs lies
in a file that nobody else can open, until the worker has read it or the run is over.
"""

import contextlib
import os
from pathlib import Path

from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.unpatched import from_json, to_json

__all__ = ["PRIVATE_REQUEST", "forget_request", "public_text", "read_request", "write_request_file"]

PRIVATE_REQUEST = "request.private.json"
_REQUEST = "request.json"


def public_text(text: str) -> str:
    """A request's JSON without secrets; the same text where it holds none."""
    value = from_json(text)
    public = without_process_secrets(value)
    return text if public == value else to_json(public)


def write_request_file(directory: Path, text: str) -> None:
    """Writes a request into a new directory.

    Raises:
        OSError: it cannot be written.
    """
    public = public_text(text)
    if public != text:
        descriptor = os.open(directory / PRIVATE_REQUEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
    (directory / _REQUEST).write_text(public, encoding="utf-8")


def read_request(directory: Path) -> bytes:
    """The request as it was made, for the worker.

    Raises:
        OSError: there is none.
    """
    with contextlib.suppress(FileNotFoundError):
        return (directory / PRIVATE_REQUEST).read_bytes()
    return (directory / _REQUEST).read_bytes()


def forget_request(directory: Path) -> None:
    """Takes away what only the worker was to read."""
    with contextlib.suppress(OSError):
        (directory / PRIVATE_REQUEST).unlink(missing_ok=True)
