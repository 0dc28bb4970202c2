"""The file that a process for a user's script is started with, by its path.

Started so, the process finds on ``sys.path`` what ``python script.py`` would find there and nothing else: ``-m`` and ``-c``
would put the working directory in front while the doctor's own modules are imported.
"""

import sys
from pathlib import Path


def begin() -> None:
    """Takes this file's folder off ``sys.path`` and runs what ``sys.argv[1]/request.json`` asks for."""
    if not sys.flags.safe_path:
        del sys.path[0]
    home = str(Path(__file__).resolve().parents[2])
    installed = home in sys.path
    if not installed:
        sys.path.append(home)
    from dtypedoctor.worker.script import serve

    if not installed:
        sys.path.remove(home)
    serve(Path(sys.argv[1]))


if __name__ == "__main__":
    begin()
