"""The file that a process of a fresh interpreter is started with, by its path: for a user's script, and for each rank.

Started so, the process finds on ``sys.path`` what ``python script.py`` would find there and nothing else: ``-m`` and ``-c``
would put the working directory in front while the doctor's own modules are imported.
"""

import os
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
    before = _real_modules_first()
    from pathlib import Path

    from dtypedoctor.worker import main_module, script

    is_rank = sys.argv[1] == RANK
    if is_rank:
        _die_with_torchrun()
    sys.path[:] = before
    if not installed:
        sys.path.remove(home)
    main_module.at_start = AT_START
    if is_rank:
        script.serve_rank(Path(sys.argv[2]))
    else:
        script.serve(Path(sys.argv[1]))


def _die_with_torchrun() -> None:
    """However torchrun is ended, this process, which it has started, ends with it."""
    import ctypes
    import signal

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _real_modules_first() -> list[str]:
    """Puts what ``PYTHONPATH`` names behind everything else on ``sys.path``; what stood there before, to be put back.

    So this package imports the real modules of the standard library where the user has others of the same names.
    """
    before = list(sys.path)
    named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    sys.path.sort(key=named.__contains__)
    return before


if __name__ == "__main__":
    begin()
