"""What Python runs first in each process that a treated script starts: puts the corrections into it, then the user's own such file."""

import contextlib
import importlib
import os
import sys


def begin() -> None:
    """Takes this folder off ``sys.path`` and treats the process; whatever goes wrong, the program runs."""
    here = os.path.dirname(os.path.abspath(__file__))
    before = [entry for entry in sys.path if os.path.abspath(entry) != here]
    sys.path[:] = [*before, os.path.dirname(os.path.dirname(os.path.dirname(here)))]
    try:
        from dtypedoctor.worker.treated import follow

        follow()
    finally:
        sys.path[:] = before


if os.environ.get("DTYPEDOCTOR_TREATED"):
    with contextlib.suppress(
        ImportError, KeyError, OSError, ValueError
    ):  # the package is gone, or the variable is not ours
        begin()
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":  # the user's own fails
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)
