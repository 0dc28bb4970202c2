"""A copy-on-write view of the working directory, for the runs of a script after the first.

In a mount namespace of its own an overlay lies over the working directory. What the first run has created there is not in it, and what a later run writes
goes to a temporary directory that is deleted afterwards. The directory of the run lies elsewhere.

Run by its path, this file is the program that makes the view and then becomes the command (``python view.py SETTINGS COMMAND…``);
so it imports nothing of this package.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

MOST_ENTRIES = 200_000
"""Files and directories up to which a working directory is listed before the first run; a million take about ten seconds."""
FAILED = "no_view.txt"
"""In the directory of a run: why its view could not be made."""

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_NO_VIEW = 125


class NoViewError(Exception):
    """There can be no view of a directory, for the reason that this error's text gives."""


class View:
    """A view of a directory in which the files that are there now are the only ones.

    Args:
        folder: the directory.

    Raises:
        NoViewError: there can be none here, or it holds too many files to list them, or somebody else's.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        mounted = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        for place in (line.split(" ")[4].replace("\\040", " ") for line in mounted):
            if place.startswith(f"{str(folder).rstrip('/')}/"):
                raise NoViewError(f"another file system is mounted at {place}")
        self._before = _listed(folder)
        with tempfile.TemporaryDirectory(prefix="dtypedoctor-probe-") as place, self.before(Path(place)) as words:
            subprocess.run([*words, "/bin/true"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    @contextlib.contextmanager
    def before(self, run: Path) -> Iterator[list[str]]:
        """The words that stand before a command so that it runs in the view; what it writes to the directory ``run`` stays.

        Raises:
            NoViewError: it could not be made, and the command has not begun.
        """
        created = _listed(self._folder) - self._before
        topmost = sorted(path for path in created if os.path.dirname(path) not in created)
        scratch = tempfile.mkdtemp(prefix="dtypedoctor-view-")
        settings = Path(scratch, "settings.json")
        wanted = {"folder": str(self._folder), "run": str(run.resolve()), "scratch": scratch, "created": topmost}
        settings.write_text(json.dumps(wanted), encoding="utf-8")
        try:
            yield [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(settings)]
            with contextlib.suppress(FileNotFoundError):
                raise NoViewError((run / FAILED).read_text(encoding="utf-8"))
        finally:
            with contextlib.suppress(OSError):  # the kernel's own directory, in which not even its owner may look
                Path(scratch, "disk", "work", "work").chmod(0o700)
            shutil.rmtree(scratch, ignore_errors=True)


def _listed(folder: Path) -> set[str]:
    """Everything below ``folder``, by its relative path."""
    found: set[str] = set()
    folders = [str(folder)]
    us = (os.geteuid(), os.getegid()) if os.geteuid() else None  # only root can copy what belongs to somebody else
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if len(found) == MOST_ENTRIES:
                    raise NoViewError(f"{folder} holds more than {MOST_ENTRIES:,} files")
                status = entry.stat(follow_symlinks=False)
                if us is not None and us != (status.st_uid, status.st_gid):
                    raise NoViewError(f"{entry.path} belongs to another user or group")
                found.add(os.path.relpath(entry.path, folder))
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return found


def main(settings: str, command: list[str]) -> None:
    """Becomes ``command`` in the view that the file ``settings`` describes; ends with 125 where there can be none."""
    with open(settings, encoding="utf-8") as file:
        wanted = json.load(file)
    try:
        _enter(wanted["folder"], wanted["scratch"])
        for path in (os.path.join(wanted["folder"], name) for name in wanted["created"]):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
    except OSError as error:
        with open(os.path.join(wanted["run"], FAILED), "w", encoding="utf-8") as file:
            file.write(str(error))
        sys.exit(_NO_VIEW)
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # this interpreter ignores them, which the command would go on doing
        signal.signal(number, signal.SIG_DFL)
    os.execv(command[0], command)


def _enter(folder: str, scratch: str) -> None:
    """Lays the overlay over ``folder``, in a mount namespace that this process and all that it starts have to themselves."""
    options = _own_namespace()
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    below = os.path.join(scratch, "below")
    os.mkdir(below)
    _mount(folder, below, "", _BIND)  # so its name, which may hold a comma, is no option of the overlay
    try:
        _overlay(folder, below, os.path.join(scratch, "disk"), options)
    except OSError:  # the temporary directory lies on an overlay itself, or in the folder
        memory = os.path.join(scratch, "memory")
        os.mkdir(memory)
        _mount("tmpfs", memory, "tmpfs", 0)
        _overlay(folder, below, os.path.join(memory, "files"), options)
    os.chdir(folder)


def _own_namespace() -> str:
    """Leaves the mounts of the system, as the same user; which options an overlay needs here."""
    if _libc.unshare(_NEW_MOUNTS) == 0:
        return ""
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    return ",userxattr"


def _overlay(folder: str, below: str, place: str, options: str) -> None:
    """Lays an overlay over ``folder``; what is written in it goes to ``place``, which is created.

    Raises:
        OSError: it cannot be laid, or could not hide a directory that is removed and created again.
    """
    if os.path.commonpath([folder, place]) == folder:
        raise OSError(f"{place} lies in it")
    upper, work = os.path.join(place, "upper"), os.path.join(place, "work")
    os.makedirs(upper)
    os.mkdir(work)
    shutil.copystat(folder, upper)
    mark = f"{'user' if options else 'trusted'}.overlay.opaque"
    os.setxattr(upper, mark, b"n")
    os.removexattr(upper, mark)
    _mount("overlay", folder, "overlay", 0, f"lowerdir={below},upperdir={upper},workdir={work}{options}")


_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(options)
    )
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or source}: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
