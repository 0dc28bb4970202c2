"""What Python runs first in each process that a treated script starts: puts the corrections into it, then the user's own such file.

Any interpreter may find this file through ``PYTHONPATH``, of whatever environment and release, so nothing of the package is imported
before it is known that this is the script's own.
"""

import contextlib
import importlib
import json
import os
import sys


def begin(before: "list[str]") -> None:
    """Treats the process where its interpreter is that of the treated script; ``before`` is ``sys.path`` without this folder."""
    if json.loads(os.environ["DTYPEDOCTOR_TREATED"])["python"] != [sys.prefix, sys.version]:
        return
    home = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
    sys.path[:] = [*before, home]
    try:
        from dtypedoctor.worker.treated import follow

        follow()
    finally:
        sys.path[:] = before


HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
ODD = (ImportError, SyntaxError, KeyError, TypeError, AttributeError, OSError, ValueError)
with contextlib.suppress(*ODD):  # the package is gone, or the variable is not there or not ours: the program runs
    begin(list(sys.path))
this = sys.modules.pop("sitecustomize")
try:
    importlib.import_module("sitecustomize")
except ImportError as error:
    if error.name != "sitecustomize":  # the user's own fails
        raise
finally:
    sys.modules.setdefault("sitecustomize", this)
