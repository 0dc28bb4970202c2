"""A copy-on-write view of the working directory, for the runs of a script after the first.

In a mount namespace of its own an overlay lies over the working directory. What the first run has created there is not in it, and what a later run writes
goes to a temporary directory that is deleted afterwards. The directory of the run lies elsewhere.

A trial of an edit, which nobody has asked for, is also alone: temporary files and caches are copies too, everything else is read-only, there is no
network, and sockets that are files lead nowhere. Where the kernel has Landlock, named pipes elsewhere cannot be written to, and since Linux 6.12 no signals
reach processes that the program has not started. The edited files lie over those of the program.

Run by its path, this file is the program that makes the view and then becomes the command (``python view.py SETTINGS COMMAND…``);
so it imports nothing of this package.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MOST_ENTRIES = 200_000
"""Files and directories up to which a working directory is listed before the first run; a million take about ten seconds."""
FAILED = "no_view.txt"
"""In the directory of a run: why its view could not be made."""

_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x20000, 0x10000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _RECURSIVE_AT, _READ_ONLY = 442, 0x8000, 1
_SET_FLAGS, _UP = 0x8914, 1
_NEW_RULES, _ADD_RULE, _RESTRICT_SELF, _NO_NEW_PRIVILEGES = 444, 445, 446, 38
_WRITE_FILE, _SIGNALS, _BENEATH = 1 << 1, 1 << 1, 1
_NO_VIEW = 125


class NoViewError(Exception):
    """There can be no view of a directory, for the reason that this error's text gives."""


class View:
    """A view of a directory in which the files that are there now are the only ones.

    Args:
        folder: the directory.
        began: when the first run began, of which what was created or written since is left out; None where it is to begin.

    Raises:
        NoViewError: there can be none here, or it holds too many files to list them, or somebody else's.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path, began: float | None = None) -> None:
        self._folder = folder
        mounted = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        for place in (line.split(" ")[4].replace("\\040", " ") for line in mounted):
            if place.startswith(f"{str(folder).rstrip('/')}/"):
                raise NoViewError(f"another file system is mounted at {place}")
        self._before = _listed(folder, began)
        with tempfile.TemporaryDirectory(prefix="dtypedoctor-probe-") as place, self.before(Path(place)) as words:
            subprocess.run([*words, "/bin/true"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    @contextlib.contextmanager
    def before(self, run: Path, edited: Mapping[str, str] | None = None) -> Iterator[list[str]]:
        """The words that stand before a command so that it runs in the view; what it writes to the directory ``run`` stays.

        Args:
            run: where the run is recorded.
            edited: the text of files of the program, by path: an edit on trial, which runs alone.

        Raises:
            NoViewError: it could not be made, and the command has not begun.
        """
        created = _listed(self._folder) - self._before
        topmost = sorted(path for path in created if os.path.dirname(path) not in created)
        scratch = tempfile.mkdtemp(prefix="dtypedoctor-view-")
        settings = Path(scratch, "settings.json")
        copies = {}
        for number, (path, text) in enumerate((edited or {}).items()):
            copies[path] = os.path.join(scratch, f"edited-{number}")
            Path(copies[path]).write_text(text, encoding="utf-8")
        wanted = {
            "folder": str(self._folder),
            "run": str(run.resolve()),
            "scratch": scratch,
            "created": topmost,
            "edited": copies,
        }
        settings.write_text(json.dumps(wanted), encoding="utf-8")
        try:
            yield [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(settings)]
            with contextlib.suppress(FileNotFoundError):
                raise NoViewError((run / FAILED).read_text(encoding="utf-8"))
        finally:
            with contextlib.suppress(OSError):  # the kernel's own directory, in which not even its owner may look
                for inside in Path(scratch).glob("*/disk/work/work"):
                    inside.chmod(0o700)
            shutil.rmtree(scratch, ignore_errors=True)


def _listed(folder: Path, before: float | None = None) -> set[str]:
    """Everything below ``folder``, by its relative path; no files that were written since ``before``, nor folders that hold only such."""
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
                is_folder = entry.is_dir(follow_symlinks=False)
                if before is None or status.st_ctime < before:
                    found.add(os.path.relpath(entry.path, folder))
                if is_folder:
                    folders.append(entry.path)
    for path in list(found) if before is not None else ():
        while path := os.path.dirname(path):
            found.add(path)
    return found


def main(settings: str, command: list[str]) -> None:
    """Becomes ``command`` in the view that the file ``settings`` describes; ends with 125 where there can be none."""
    with open(settings, encoding="utf-8") as file:
        wanted = json.load(file)
    try:
        _enter(wanted["folder"], wanted["scratch"], wanted["run"], wanted["edited"])
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


def _enter(folder: str, scratch: str, run: str, edited: Mapping[str, str]) -> None:
    """Lays the overlay over ``folder``, in a mount namespace that this process and all that it starts have to themselves."""
    sockets = _sockets() if edited else []
    options = _own_namespace(alone=bool(edited))
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    outside = os.open(run, os.O_PATH)  # by its path it will be another one
    copies = {path: os.open(copy, os.O_PATH) for path, copy in edited.items()}
    covered = _apart([folder, tempfile.gettempdir(), os.path.expanduser("~/.cache")] if edited else [folder])
    for number, place in enumerate(covered):
        room = os.path.join(scratch, str(number))
        os.mkdir(room)
        _cover(place, room, options)
    if edited:
        _mount(f"/proc/self/fd/{outside}", run, "", _BIND)
        for path, copy in copies.items():
            _mount(f"/proc/self/fd/{copy}", path, "", _BIND)
        for path in sockets:
            with contextlib.suppress(OSError):  # it is gone, or not one of these files
                _mount("/dev/null", path, "", _BIND)
        _set_read_only("/", _RECURSIVE_AT)
        for place in (*covered, run, "/dev", "/proc"):
            _set_read_only(place, _RECURSIVE_AT, writable=True)
        _confine([*covered, run, "/dev", "/proc"])
    for descriptor in (outside, *copies.values()):
        os.close(descriptor)
    os.chdir(folder)


def _apart(folders: Sequence[str]) -> list[str]:
    """Those of the folders that are there, without those that lie in another one."""
    real = list(dict.fromkeys(os.path.realpath(folder) for folder in folders if os.path.isdir(folder)))
    return [
        one for one in real if not any(other != one and os.path.commonpath([one, other]) == other for other in real)
    ]


def _cover(folder: str, scratch: str, options: str) -> None:
    """Lays an overlay over one folder; what is written in it goes to ``scratch``, or to memory where that lies in it or on an overlay."""
    below = os.path.join(scratch, "below")
    os.mkdir(below)
    _mount(folder, below, "", _BIND)  # so its name, which may hold a comma, is no option of the overlay
    try:
        if os.path.commonpath([folder, scratch]) == folder:
            raise OSError(f"{scratch} lies in it")
        _overlay(folder, below, os.path.join(scratch, "disk"), options)
    except OSError:
        memory = os.path.join(scratch, "memory")
        os.mkdir(memory)
        _mount("tmpfs", memory, "tmpfs", 0)
        _overlay(folder, below, os.path.join(memory, "files"), options)


def _own_namespace(*, alone: bool) -> str:
    """Leaves the mounts of the system, and its network if it is to be ``alone``, as the same user; which options an overlay needs here."""
    kinds, options = _NEW_MOUNTS | (_NEW_NETWORK if alone else 0), ""
    if _libc.unshare(kinds) != 0:
        user, group = os.geteuid(), os.getegid()
        if _libc.unshare(kinds | _NEW_USER) != 0:
            raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        options = ",userxattr"
    if alone:  # the processes of a program still reach each other
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    return options


def _sockets() -> list[str]:
    """The sockets of the system that are files: those can be connected to also where they lie on what is read-only."""
    with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.rstrip("\n").split(maxsplit=7)[-1] for line in file}
    return [path for path in paths if path.startswith("/") and os.path.exists(path)]


def _confine(writable: Sequence[str]) -> None:
    """Has this process and all that it starts write to nothing but what is below ``writable``, nor signal others, as far as the kernel knows of such rules."""
    version = _libc.syscall(_NEW_RULES, None, 0, 1)
    wanted = struct.pack("3Q", _WRITE_FILE, 0, _SIGNALS if version >= 6 else 0)
    rules = _libc.syscall(_NEW_RULES, wanted, len(wanted), 0) if version > 0 else -1
    if rules < 0:
        return
    for place in writable:
        folder = os.open(place, os.O_PATH)
        _libc.syscall(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", _WRITE_FILE, folder), 0)
        os.close(folder)
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0:
        _libc.syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _set_read_only(path: str, flags: int, *, writable: bool = False) -> None:
    """Makes the mount at ``path``, and those below it, read-only, or writable again."""
    attributes = struct.pack("4Q", 0 if writable else _READ_ONLY, _READ_ONLY if writable else 0, 0, 0)
    done = _libc.syscall(_MOUNT_SETATTR, -100, os.fsencode(path), flags, attributes, len(attributes))
    if done != 0 and not writable:  # some of what is to be writable is no mount
        raise OSError(ctypes.get_errno(), f"mount_setattr: {os.strerror(ctypes.get_errno())}")


def _overlay(folder: str, below: str, place: str, options: str) -> None:
    """Lays an overlay over ``folder``; what is written in it goes to ``place``, which is created.

    Raises:
        OSError: it cannot be laid, or could not hide a directory that is removed and created again.
    """
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
