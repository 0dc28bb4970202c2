"""A copy-on-write view of the working directory, for the runs of a script after the first.

In a mount namespace of its own an overlay lies over the working directory. What the first run has created there is removed in the
overlay, what it has changed or removed is put back as far as it was kept, and what the script writes goes to a temporary directory
that is deleted afterwards. The directory of the run lies elsewhere.

Run by its path, this file is the program that makes the view and then becomes the command (``python view.py SETTINGS COMMAND…``);
so it imports nothing of this package.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

MOST_ENTRIES = 200_000
"""Files and directories up to which a working directory is listed before the first run; a million take about ten seconds."""
KEPT_BYTES, MOST_KEPT = 64 << 20, 5_000
"""Bytes, and number, of the files that are copied before the first run, so that a rerun finds them as they were."""
FAILED = "no_view.txt"
"""In the directory of a run: why its view could not be made."""

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_NO_VIEW = 125


class NoViewError(Exception):
    """There can be no view of a directory, for the reason that this error's text gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a run has done to the files of a directory, as paths relative to it, in order.

    Attributes:
        created: files and directories that were not there before; of a new directory only itself.
        changed: files that were there before with another size or time of change.
        removed: files and directories that were there before and are gone.
    """

    created: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(sorted((*self.created, *self.changed, *self.removed)))


class Before:
    """A directory as it is before a run. Use as a context manager, which deletes the copies at its end.

    Args:
        folder: the directory.

    Raises:
        NoViewError: it holds too many files to list them, or somebody else's.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._copies = tempfile.TemporaryDirectory(prefix="dtypedoctor-kept-", ignore_cleanup_errors=True)
        self._own = os.path.realpath(self._copies.name)
        self._entries = _listed(folder, self._own)
        self._copied = self._copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.cleanup()

    def written(self) -> Written:
        """What has happened to the directory since.

        Raises:
            NoViewError: it holds too many files to list them.
            OSError: it cannot be read.
        """
        now = _listed(self.folder, self._own)
        changed = [path for path, state in self._entries.items() if path in now and now[path] != state]
        return Written(
            created=_topmost(now.keys() - self._entries.keys()),
            changed=tuple(sorted(changed)),
            removed=tuple(sorted(self._entries.keys() - now.keys())),
        )

    def put_back(self, written: Written) -> dict[str, str | None]:
        """The copy of each file that a rerun is to find as it was, and None for each directory, which stands before what lies in it."""
        wanted = sorted({*written.changed, *written.removed})
        return {path: self._copied.get(path) for path in wanted if path in self._copied or self._is_folder(path)}

    def lost(self, written: Written) -> list[str]:
        """What is changed or removed and was not copied, so that a rerun does not find it as it was."""
        kept = self.put_back(written)
        return [path for path in (*written.changed, *written.removed) if path not in kept]

    def _is_folder(self, path: str) -> bool:
        return self._entries[path].kind == stat.S_IFDIR

    def _copy(self) -> dict[str, str]:
        """The path of the copy of each file that is kept: those that were written last, as far as there is room."""
        copied: dict[str, str] = {}
        room = KEPT_BYTES
        files = [(state.time, state.size, path) for path, state in self._entries.items() if state.kind == stat.S_IFREG]
        for number, (_, size, path) in enumerate(sorted(files, reverse=True)[:MOST_KEPT]):
            if size > room:
                continue
            copy = os.path.join(self._copies.name, str(number))
            with contextlib.suppress(
                OSError
            ):  # it cannot be read, or there is no room: the rerun does not find it then
                shutil.copy2(self.folder / path, copy)
                copied[path] = copy
                room -= size
        return copied


class _State(NamedTuple):
    """What is compared of a file: what it is, its size in bytes and the nanosecond of its last change; of a directory only the first."""

    kind: int
    size: int = 0
    time: int = 0


def _listed(folder: Path, own: str) -> dict[str, _State]:
    """Everything below ``folder`` but the directory ``own``, by its relative path."""
    found: dict[str, _State] = {}
    folders = [str(folder)]
    us = (os.geteuid(), os.getegid()) if os.geteuid() else None  # only root can copy what belongs to somebody else
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.path == own:
                    continue
                if len(found) == MOST_ENTRIES:
                    raise NoViewError(f"{folder} holds more than {MOST_ENTRIES:,} files")
                status = entry.stat(follow_symlinks=False)
                if us is not None and us != (status.st_uid, status.st_gid):
                    raise NoViewError(f"{entry.path} belongs to another user or group")
                found[os.path.relpath(entry.path, folder)] = _state(status)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return found


def _state(status: os.stat_result) -> _State:
    kind = stat.S_IFMT(status.st_mode)
    return _State(kind) if kind == stat.S_IFDIR else _State(kind, status.st_size, status.st_mtime_ns)


def _topmost(paths: AbstractSet[str]) -> tuple[str, ...]:
    """The paths that lie in none of the others, in order."""
    return tuple(sorted(path for path in paths if os.path.dirname(path) not in paths))


@contextlib.contextmanager
def in_view(before: Before, written: Written, run: Path) -> Iterator[list[str]]:
    """The words to put before a command so that it runs in a view of ``before.folder`` in which it is as it was before.

    Args:
        before: the directory before the first run.
        written: what that has done to it.
        run: directory of this run, which exists when the command is started. What is written there stays.
    """
    with _program(before.folder, run, written.created, before.put_back(written)) as words:
        yield words


def require_view(folder: Path) -> None:
    """Makes a view of a directory, and throws it away.

    Raises:
        NoViewError: there can be none.
    """
    below = [place for place in _mounted() if place.startswith(f"{str(folder).rstrip('/')}/")]
    if below:
        raise NoViewError(f"another file system is mounted at {below[0]}")
    with (
        tempfile.TemporaryDirectory(prefix="dtypedoctor-probe-") as place,
        _program(folder, Path(place), (), {}) as words,
    ):
        subprocess.run([*words, "/bin/true"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        why = why_no_view(Path(place))
    if why:
        raise NoViewError(why)


def why_no_view(run: Path) -> str:
    """Why the command of a run was not started; empty where it was."""
    try:
        return (run / FAILED).read_text(encoding="utf-8")
    except OSError:
        return ""


def _mounted() -> Iterator[str]:
    """Where file systems are mounted."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        yield line.split(" ")[4].replace("\\040", " ")


@contextlib.contextmanager
def _program(folder: Path, run: Path, created: tuple[str, ...], put_back: dict[str, str | None]) -> Iterator[list[str]]:
    scratch = Path(tempfile.mkdtemp(prefix="dtypedoctor-view-"))
    settings = scratch / "settings.json"
    wanted = {
        "folder": str(folder),
        "run": str(run.resolve()),
        "scratch": str(scratch),
        "created": created,
        "put_back": put_back,
    }
    settings.write_text(json.dumps(wanted), encoding="utf-8")
    try:
        yield [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(settings)]
    finally:
        with contextlib.suppress(OSError):  # the kernel's own directory, in which not even its owner may look
            (scratch / "disk" / "work" / "work").chmod(0o700)
        shutil.rmtree(scratch, ignore_errors=True)


def main(settings: str, command: list[str]) -> None:
    """Becomes ``command`` in the view that the file ``settings`` describes; ends with 125 where there can be none."""
    with open(settings, encoding="utf-8") as file:
        wanted = json.load(file)
    try:
        _enter(wanted["folder"], wanted["scratch"])
        _restore(wanted["folder"], wanted["created"], wanted["put_back"])
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


def _restore(folder: str, created: list[str], put_back: dict[str, str | None]) -> None:
    """Brings the view to what the directory was before the first run."""
    for name in (*created, *put_back):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    for name, copy in put_back.items():
        path = os.path.join(folder, name)
        if copy is None:
            os.makedirs(path, exist_ok=True)
        else:
            shutil.copy2(copy, path)


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
