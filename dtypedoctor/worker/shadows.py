"""Modules of a script that have the names of the standard library's: the script imports them, as with Python, and this package never.

When a script begins, more of the standard library has been imported than with ``python script.py``. Where the script's folder
has a module of such a name, the script must still get that one; this package keeps the real one that it has imported.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

__all__ = ["let_through", "real_modules_first"]


def real_modules_first() -> list[str]:
    """Puts what ``PYTHONPATH`` names behind everything else on ``sys.path``; what stood there before, to be put back.

    ``sys.path`` must not hold the script's folder or the working directory yet.
    """
    before = list(sys.path)
    named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    sys.path.sort(key=named.__contains__)
    return before


def let_through(folders: Sequence[str], at_start: frozenset[str]) -> None:
    """Forgets each module of the standard library that this package has imported and that ``folders`` have one of their own for.

    Args:
        folders: what stands before the standard library on ``sys.path``.
        at_start: names of the modules that the interpreter itself had imported.
    """
    imported = {name.partition(".")[0] for name in sys.modules}
    kept = {name.partition(".")[0] for name in at_start} | set(sys.builtin_module_names)
    for name in imported & sys.stdlib_module_names - kept:
        found = PathFinder.find_spec(name, list(folders))
        if (
            found is not None and found.loader is not None
        ):  # a folder without code does not hide a module that comes later
            for one in [one for one in sys.modules if one == name or one.startswith(name + ".")]:
                del sys.modules[one]
