"""Takes away what a command has made, and nothing else: a file that the doctor did not make is somebody's work."""

import contextlib
import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from dtypedoctor.redaction.redact import PRIVATE_REQUEST
from dtypedoctor.runner.child import STDERR, STDOUT
from dtypedoctor.runner.launch import EXIT
from dtypedoctor.scenario.request import REQUEST
from dtypedoctor.trace.cursor import CURSOR
from dtypedoctor.trace.events import NAMES, Refused
from dtypedoctor.trace.ranks import LEADING, STREAMS
from dtypedoctor.trace.writer import EVENTS

__all__ = ["clear", "remove_unused"]

_OWN = {
    REQUEST, PRIVATE_REQUEST, EVENTS, CURSOR, EXIT, STDOUT, STDERR, "server.log", "bisection.jsonl", "random_states.json", STREAMS,
    "failures.json", LEADING, "error.json", "stdout.log", "stderr.log", "folded.json", "folded.json.part",
}  # fmt: skip
_DETAIL = re.compile(r"detail-[0-9.]+\.jsonl")
_REFUSED = f'"e":"{NAMES[Refused]}"'.encode()
_ENOUGH = 1 << 16
"""Bytes of a trace in which a refusal stands, if it holds one: nothing was run before it."""


def remove_unused(directory: Path) -> None:
    """Takes a run directory away in which nothing was run.

    One that holds a run, however that ended, stays as it is; so does every file that the doctor did not make, and the
    folders that lead to it.
    """
    if not any(_is_run(trace) for trace in directory.rglob(EVENTS)):
        _remove_own(directory)


def clear(place: Path) -> None:
    """Makes room for a run where an interrupted one lies: the doctor's own files go, what else is there is set aside.

    It is then in the directory of the same name with ``.kept-1`` (or another number) behind it.
    """
    if place.is_symlink() or not place.is_dir():
        return
    _remove_own(place)
    if place.exists():
        aside = (place.with_name(f"{place.name}.kept-{number}") for number in count(1))
        place.rename(next(path for path in aside if not path.exists()))


def _is_run(trace: Path) -> bool:
    try:
        with trace.open("rb") as file:
            return _REFUSED not in file.read(_ENOUGH)
    except OSError:  # what cannot be looked into is left alone
        return True


def _remove_own(directory: Path) -> None:
    for folder, folders, files in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # what cannot be removed stays
            for name in _own([*files, *folders]):
                path = Path(folder, name)
                if path.is_symlink() or path.is_file():
                    path.unlink()
        with contextlib.suppress(OSError):  # it is not empty
            Path(folder).rmdir()


def _own(names: list[str]) -> Iterator[str]:
    return (name for name in names if name in _OWN or _DETAIL.fullmatch(name))
