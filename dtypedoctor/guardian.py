"""Where a program is recorded while it runs, how the record gets to where it was asked for, and who sees to that where a process is killed.

A program may hash, copy, archive or commit all that lies below its working directory, so nothing of ours lies there while it runs. Run by its path,
this file is the process that stands guard, and imports nothing of this package.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

PROGRAM = os.path.abspath(__file__)
"""This file, as it is run; ``-I -S`` go before it."""
FOLLOW = "--follow"
"""Stands before the number of the process whose end is waited for, and what is then moved where."""
ENOUGH_ROOM = 1 << 30
"""Bytes; a folder on a disk with less is taken where no other has more."""

SECONDS_BETWEEN_LOOKS = 1.0


def make_private_folder(name: str, program: Iterable[str], beside: str = ".") -> str:
    """Makes a folder that only this user can enter, and in none of the folders that a program may take for its own.

    Args:
        name: of the run.
        program: its working directory, and the folder of its script.
        beside: where to make it where nothing else can be written.

    Raises:
        OSError: it can be made nowhere.
    """
    # What somebody has chosen for temporary files comes before disks, and these before memory.
    chosen = [os.environ["TMPDIR"]] if os.environ.get("TMPDIR") else []
    usual = ["/var/tmp", "/tmp", os.path.expanduser("~/.cache"), os.environ.get("XDG_RUNTIME_DIR") or "/dev/shm"]
    candidates = [os.path.realpath(folder) for folder in (*chosen, *usual)]
    own = [os.path.realpath(folder) for folder in program]
    # What is the program's comes last, and is better than nothing: where it runs in /, all folders are.
    is_own = {folder: any(os.path.commonpath([folder, other]) == other for other in own) for folder in candidates}
    candidates.sort(key=lambda folder: (is_own[folder], -min(_room(folder), ENOUGH_ROOM)))
    for folder in (*candidates, beside):
        path = os.path.join(folder, f"dtypedoctor-{name}-{os.urandom(4).hex()}")
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            os.mkdir(path, 0o700)
            return path
    raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _room(folder: str) -> int:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


def make_run_directory(wanted: str, names: Sequence[str] = (), *, merge: bool = False) -> str:
    """Creates the directory of a run, with a number behind its name where that is taken.

    Args:
        wanted: its path.
        names: what is going to be moved there.
        merge: take one that is there already, unless it has one of ``names``: the program may have made it.

    Raises:
        OSError: it cannot be created.
    """
    for number in count():
        path = wanted + (f"-{number}" if number else "")
        try:
            os.makedirs(path)
        except FileExistsError:
            if merge and os.path.isdir(path) and not any(os.path.lexists(os.path.join(path, name)) for name in names):
                return path
            continue
        return path
    raise AssertionError  # count() has no end


def move_into(source: str, directory: str) -> None:
    """Moves all that lies in ``source``, each part at once, and removes it. To another disk it is copied, written through and then renamed.

    Raises:
        OSError: there is no room, or a part is there already; what has not been moved is where it was.
    """
    for name in sorted(os.listdir(source)):
        old, new = os.path.join(source, name), os.path.join(directory, name)
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        try:
            os.rename(old, new)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            import shutil  # seldom needed

            part = os.path.join(os.path.dirname(new), f".{os.path.basename(new)}.part-{os.urandom(4).hex()}")
            is_folder = os.path.isdir(old)
            with contextlib.ExitStack() as unfinished:
                unfinished.callback(_remove, part)
                if is_folder:
                    shutil.copytree(old, part, symlinks=True)
                else:
                    shutil.copy2(old, part, follow_symlinks=False)
                for path in _files(part):
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
                os.rename(part, new)
                unfinished.pop_all()
            _remove(old)
    os.rmdir(source)


def _remove(path: str) -> None:
    import shutil

    with contextlib.suppress(OSError):
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _files(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (file for name in names if os.path.isfile(file := os.path.join(folder, name)))


def end(process: int) -> None:
    """Kills a process, its group, and all of its descendants in whatever groups and sessions they are."""
    doomed = _descendants(process)
    for kill, ones in ((os.killpg, [process]), (os.kill, doomed)):
        for one in ones:
            try:
                kill(one, signal.SIGKILL)
            except OSError:  # it has ended, or is somebody else's
                continue


def _descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has ended in the meantime
            continue
        children.setdefault(parent, []).append(int(name))
    found = [process]
    for one in found:  # which grows meanwhile
        found += children.get(one, [])
    return found


def _guard() -> None:
    """Waits until the process at the other end of standard input has ended, and does what its last line asks for."""
    told = b""
    while chunk := os.read(0, 1 << 16):
        told += chunk
    import json

    *lines, _ = told.split(b"\n")
    wanted = json.loads(lines[-1]) if lines else {"end": [], "remove": None, "move": None}
    for process in wanted["end"]:
        end(process)
    if wanted["remove"]:
        _remove(wanted["remove"])
    if wanted["move"]:
        _move(*wanted["move"])


def _follow(process: int, source: str, wanted: str) -> None:
    """Moves a record when a process has ended that has not done so itself. This process is nobody's child, and ends when there is nothing to move."""
    import select

    ended = os.pidfd_open(process)
    if os.fork():
        return
    os.setsid()
    os.chdir("/")
    os.closerange(3, ended)
    os.closerange(ended + 1, 1 << 12)
    while os.path.isdir(source):
        if select.select([ended], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            _move(source, wanted, merge=True)
            return


def _move(source: str, wanted: str, merge: bool) -> None:
    with contextlib.suppress(OSError):  # it stays where it is
        names = os.listdir(source)
        move_into(source, make_run_directory(wanted, names, merge=merge))


if __name__ == "__main__":
    if sys.argv[1:2] == [FOLLOW]:
        _follow(int(sys.argv[2]), *sys.argv[3:5])
    else:
        _guard()
