"""The file that a process of a fresh interpreter is started with, by its path: for a user's script, and for each rank.

Started so, the process finds on ``sys.path`` what ``python script.py`` would find there and nothing else: ``-m`` and ``-c``
would put the working directory in front while the doctor's own modules are imported.
"""

import _signal  # type: ignore[import-not-found]  # there from the start, unlike signal
import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is not imported for a script
    from collections.abc import Callable

AT_START = frozenset(sys.modules)
"""What the interpreter has imported for any program."""

RANK = "--rank"
"""Stands before the directory where it is that of all ranks, and this process is one of them."""
LAUNCHED = "--launched"
"""Stands before the same, where a launcher of the user's has started this process, maybe as the only one."""
TREATED = "--treated"
"""Stands before what :func:`dtypedoctor.worker.treated.serve` is to do, instead of a directory."""


def begin() -> None:
    """Takes this file's folder off ``sys.path`` and runs what the arguments ask for: mostly a directory with ``request.json``."""
    interrupted = _signal.getsignal(_signal.SIGINT)
    if interrupted is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # Ctrl-C before the script begins: no traceback of ours
    if not sys.flags.safe_path:
        del sys.path[0]
    added = _added_by_launcher()
    home = __file__.rsplit("/", 3)[0]
    installed = home in sys.path
    if not installed:
        sys.path.append(home)
    before = _real_modules_first()
    collects = gc.isenabled()
    gc.disable()  # what is imported here stays, and makes no garbage
    serve = _service(added)
    if collects:
        gc.enable()
    if sys.argv[1] in (RANK, LAUNCHED):
        _die_with_torchrun()
    sys.path[:] = before
    if not installed:
        sys.path.remove(home)
    if interrupted is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, interrupted)
    serve()


def _added_by_launcher() -> "list[str]":
    """Takes ``--local_rank=N`` away from before this file's own arguments: deepspeed puts it before those of the script."""
    added = []
    while sys.argv[1].startswith(("--local_rank=", "--local-rank=")):
        added.append(sys.argv.pop(1))
    return added


def _service(added: "list[str]") -> "Callable[[], None]":
    """What this process is there for, ``added`` standing before the script's arguments; whatever it needs of this package is imported here."""
    from pathlib import Path

    from dtypedoctor.worker import main_module

    main_module.at_start = AT_START
    first, *rest = sys.argv[1:]
    if first == TREATED:
        from dtypedoctor.worker import treated

        return lambda: treated.serve(rest[0])
    from dtypedoctor.worker import script

    if first == RANK:
        return lambda: script.serve_rank(Path(rest[0]))
    if first == LAUNCHED:
        return lambda: script.serve_launched(Path(rest[0]), added)
    return lambda: script.serve(Path(first))


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
