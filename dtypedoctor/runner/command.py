"""What a user's command is, and the environment in which the Python processes that it starts find the hook of this package."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtypedoctor.trace.ranks import JOB

__all__ = ["HOME", "JOB", "TREATED", "command_of_program", "hooked"]

TREATED = "DTYPEDOCTOR_TREATED"
"""Environment variable with what Python processes are corrected with, beside :data:`JOB`, where they record themselves (``worker/hooked.py``)."""
HOME = str(Path(__file__).resolve().parents[2])
"""Where this package is found: it may be a checkout that is not installed."""
_HOOK = str(Path(__file__).resolve().parents[1] / "worker" / "inherited")
"""Folder with the ``sitecustomize.py`` that Python runs first."""


def hooked(variables: Mapping[str, str], *paths: str) -> dict[str, str]:
    """This process's environment with ``variables``, in which each Python runs the hook; ``paths`` stand behind the user's own in ``PYTHONPATH``."""
    named = os.environ.get("PYTHONPATH")
    return os.environ | {**variables, "PYTHONPATH": os.pathsep.join([_HOOK, *([named] if named else []), *paths])}


def command_of_program(
    path: str | None = None,
    module: str | None = None,
    code: str | None = None,
    args: Sequence[str] = (),
    command: Sequence[str] = (),
) -> list[str]:
    """The command that the fields of a script stand for, as a shell would start it."""
    if command:
        return list(command)
    target = ["-m", module] if module is not None else ["-c", code] if code is not None else [str(path)]
    return [sys.executable, *target, *args]
