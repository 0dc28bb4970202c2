"""The file that a process of a fresh interpreter is started with, by its path: for a user's script, and for each rank.

Started so, the process finds on ``sys.path`` what ``python script.py`` would find there and nothing else: ``-m`` and ``-c``
would put the working directory in front while the doctor's own modules are imported.
"""

import sys
from pathlib import Path

RANK = "--rank"
"""Stands before the directory where it is that of all ranks, and this process is one of them."""


def begin() -> None:
    """Takes this file's folder off ``sys.path`` and runs what ``request.json`` in the directory asks for."""
    if not sys.flags.safe_path:
        del sys.path[0]
    home = str(Path(__file__).resolve().parents[2])
    installed = home in sys.path
    if not installed:
        sys.path.append(home)
    if sys.argv[1] == RANK:
        from dtypedoctor.worker.rank import enter, serve

        directory = enter(Path(sys.argv[2]))
    else:
        directory = Path(sys.argv[1])
        from dtypedoctor.worker.script import serve

    if not installed:
        sys.path.remove(home)
    serve(directory)


if __name__ == "__main__":
    begin()
