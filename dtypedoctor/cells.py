"""Cells of a notebook or of IPython: a line of one is named by its cell, since the file that it is compiled under is a temporary name.

Both sides use it, in the kernel's own process only: elsewhere no path is a cell's.
"""

import linecache
import sys
from typing import Any

_PREFIX = "cell In["


def cell_of(path: str) -> str:
    """``cell In[3]`` for the file name under which IPython compiled that cell; empty for any other file."""
    if "ipykernel_" not in path and not path.startswith("<ipython-input-"):
        return ""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(path) if shell is not None else None
    return f"cell {named[1]}" if named is not None else ""


def cell_source(name: str) -> str | None:
    """The text of a cell, given by its name or by the file name it was compiled under; None for what is no cell."""
    label = name if name.startswith(_PREFIX) else cell_of(name)
    path = _paths().get(label)
    return "".join(linecache.getlines(path)) if path is not None else None


def cells() -> list[str]:
    """The names of all cells that have run, the latest first."""
    return sorted(_paths(), key=lambda name: (len(name), name), reverse=True)


def _paths() -> dict[str, str]:
    """The file name under which each cell was compiled, by the cell's name."""
    named = {cell_of(path): path for path in list(linecache.cache)}
    named.pop("", None)
    return named
