"""Ends a process with all that it has started. Run by its path it is the guardian's program, and imports nothing of this package.

Its arguments are the process and, where what that records is hidden, the hidden directory and where it is to be moved.
"""

import os
import signal
import sys


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


def _show(hidden: str, directory: str) -> None:
    try:
        os.makedirs(directory)
        os.rename(hidden, directory)
    except OSError:  # it stays where it is
        return


if __name__ == "__main__" and not os.read(
    0, 1
):  # one byte means that all is well, the pipe's end that the doctor is gone
    end(int(sys.argv[1]))
    if sys.argv[2:]:
        _show(*sys.argv[2:])
