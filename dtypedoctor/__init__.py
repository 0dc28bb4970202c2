"""dtypedoctor: finds, explains and fixes mixed-precision failures in PyTorch training.

Importing the package does not import torch; the public names are loaded when they are first used.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is not imported here: until the command line has begun, Ctrl-C is Python's traceback
    from typing import Any

    from dtypedoctor.corrections.contract import apply
    from dtypedoctor.inprocess import watch
    from dtypedoctor.inprocess.callback import DtypeDoctorCallback
    from dtypedoctor.inprocess.lightning import LightningCallback as LightningCallback
    from dtypedoctor.lab.verify.verifying import verify_saved
    from dtypedoctor.report.files import diagnose
    from dtypedoctor.report.to_json import Report
    from dtypedoctor.version import __version__

__all__ = ["DtypeDoctorCallback", "Report", "__version__", "apply", "diagnose", "verify_saved", "watch"]


_LAZY = {
    "__version__": "dtypedoctor.version",
    "watch": "dtypedoctor.inprocess",
    "apply": "dtypedoctor.corrections.contract",
    "diagnose": "dtypedoctor.report.files",
    "Report": "dtypedoctor.report.to_json",
    "DtypeDoctorCallback": "dtypedoctor.inprocess.callback",
    "verify_saved": "dtypedoctor.lab.verify.verifying",
    "LightningCallback": "dtypedoctor.inprocess.lightning",
}
"""Where the names are. ``LightningCallback`` is not in ``__all__``: ``import *`` would need Lightning."""


def __getattr__(name: str) -> "Any":
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_imported(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})


def load_ipython_extension(shell: "Any") -> None:
    """``%load_ext dtypedoctor``: gives the notebook ``%%doctor``."""
    _imported("dtypedoctor.inprocess.notebook").load(shell)


def unload_ipython_extension(shell: "Any") -> None:
    """``%unload_ext dtypedoctor``."""
    _imported("dtypedoctor.inprocess.notebook").unload(shell)


def _imported(name: str) -> "Any":
    from importlib import import_module

    return import_module(name)
