"""What another machine does of a run: it unpacks files, runs one command on them, and returns the files that it leaves.

The module is sent by value to machines where nothing of dtypedoctor is installed, so it imports the standard library only.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

OUT = "dtypedoctor-out"
"""The folder of a job whose files come home."""
PACKAGE = "dtypedoctor-package"
"""The folder of a job from which its command imports dtypedoctor."""
ASKED = "dtypedoctor-asked"
"""The folder of a job that holds its scenario. The three have names that no folder of a user's has, for those lie beside them."""
PYTHON = "python"
"""Stands in a command for the interpreter of the machine that runs it."""
HERE = "@job/"
"""Begins words of a command that are paths in the folder with the files."""
_LAST_WORDS = 4000


class Ended(TypedDict):
    """How the command of a job ended.

    Attributes:
        status: its exit status, or minus the signal that ended it.
        timed_out: whether it was stopped at its time limit.
        seconds: wall-clock time.
        said: the end of what it printed.
        files: an archive (zip) of what it left in :data:`OUT`.
    """

    status: int
    timed_out: bool
    seconds: float
    said: str
    files: bytes


def perform(
    common: Mapping[str, bytes],
    own: Mapping[str, bytes],
    command: Sequence[str],
    environment: Mapping[str, str],
    limit: float,
    folder: str | None = None,
    begun: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Ended:
    """Runs a command on files.

    Args:
        common: content of files by their relative path, the same for many jobs.
        own: further ones.
        command: the words; :data:`PYTHON`, and what begins with :data:`HERE`, are those of this machine.
        environment: variables that it gets beside those of this machine.
        limit: seconds after which it is stopped.
        folder: working directory; if left out, the one with the files.
        begun: is called with the process of the command.
    """
    place = tempfile.mkdtemp(prefix="dtypedoctor-job-")
    try:
        (Path(place) / OUT).mkdir()
        for name, content in {**common, **own}.items():
            path = Path(place, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        words = [
            sys.executable if word == PYTHON else str(Path(place, word[len(HERE) :])) if word.startswith(HERE) else word
            for word in command
        ]
        paths = [os.path.join(place, PACKAGE), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return _run(words, Path(place), folder or place, variables, limit, begun)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(words: list[str], place: Path, folder: str, variables: dict[str, str], limit: float,
         begun: Callable[[subprocess.Popen[bytes]], None] | None) -> Ended:  # fmt: skip
    began = time.monotonic()
    printed = place / "printed.txt"
    timed_out = False
    with printed.open("wb") as file:
        process = subprocess.Popen(
            words, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARDIAN, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        if begun is not None:
            begun(process)
        process.wait(limit)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:  # also where this process is told to end
        if guardian.stdin is not None:
            if process.poll() is not None:
                guardian.stdin.write(b".")
            guardian.stdin.close()
        guardian.wait()
        process.wait()
    return Ended(
        status=process.returncode,
        timed_out=timed_out,
        seconds=time.monotonic() - began,
        said=printed.read_bytes()[-_LAST_WORDS:].decode("utf-8", "replace"),
        files=_packed(place / OUT),
    )


_GUARDIAN = f"""
import os, sys
if not os.read(0, 1):  # the process that waits for the command has ended first, or ends it
    try:
        os.killpg(int(sys.argv[1]), {int(signal.SIGKILL)})
    except OSError:
        pass
"""
"""Ends the command with the process that waits for it, even where that is killed."""


def _packed(folder: Path) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                file.write(path, path.relative_to(folder))
    return archive.getvalue()
