"""What Python runs first in each process of a program that is recorded or treated, found through ``PYTHONPATH``; then the user's own such file.

Any interpreter may find this file, of whatever environment and release, so nothing of the package is imported before it is known that it can be.
"""

import os
import sys


def begin():  # a release of Python that has no annotations runs this file, too
    # type: () -> None
    """Puts the recording into this process, or what DTYPEDOCTOR_BEGIN names."""
    package = os.path.dirname(os.path.dirname(HERE))
    home, before = os.path.dirname(package), list(sys.path)
    if "DTYPEDOCTOR_BEGIN" in os.environ:
        # What PYTHONPATH names goes behind: the user may have other modules there with names of the standard library.
        named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
        sys.path[:] = [*sorted(before, key=named.__contains__), home]
        try:
            module, _, name = os.environ["DTYPEDOCTOR_BEGIN"].partition(":")
            getattr(__import__(module, fromlist=[name]), name)()
        finally:
            sys.path[:] = before
    elif "DTYPEDOCTOR_JOB" in os.environ and sys.version_info >= (3, 11):
        path = os.path.join(package, "worker", "hooked.py")
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, {"__name__": "dtypedoctor-hook", "__file__": path})  # noqa: S102


HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
ODD = (ImportError, SyntaxError, KeyError, TypeError, AttributeError, OSError, ValueError)
try:  # noqa: SIM105
    begin()
except ODD:  # the package is gone, or the variable is not ours: the program runs; contextlib is not imported before it
    pass
this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ImportError as error:
    if error.name != "sitecustomize":  # the user's own fails
        raise
finally:
    sys.modules.setdefault("sitecustomize", this)
