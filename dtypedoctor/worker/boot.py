"""The file that a process of a fresh interpreter is started with, by its path: for a user's script, and for each rank.

Started so, the process finds on ``sys.path`` what ``python script.py`` would find there and nothing else: ``-m`` and ``-c``
would put the working directory in front while the doctor's own modules are imported.
"""

import sys

AT_START = frozenset(sys.modules)
"""What the interpreter has imported for any program."""

RANK = "--rank"
"""Stands before the directory where it is that of all ranks, and this process is one of them."""


def begin() -> None:
    """Takes this file's folder off ``sys.path`` and runs what ``request.json`` in the directory asks for."""
    if not sys.flags.safe_path:
        del sys.path[0]
    home = __file__.rsplit("/", 3)[0]
    installed = home in sys.path
    if not installed:
        sys.path.append(home)
    from dtypedoctor.worker.shadows import real_modules_first

    before = real_modules_first()
    from pathlib import Path

    from dtypedoctor.worker import main_module, rank, script

    sys.path[:] = before
    if not installed:
        sys.path.remove(home)
    main_module.at_start = AT_START
    if sys.argv[1] == RANK:
        rank.serve(rank.enter(Path(sys.argv[2])))
    else:
        script.serve(Path(sys.argv[1]))


if __name__ == "__main__":
    begin()
