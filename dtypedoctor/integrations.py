"""Callbacks of trainers, each imported with its library when it is first used.

``TrainerCallback`` is for transformers' ``Trainer`` and every trainer of TRL, ``LightningCallback`` for Lightning. They take the arguments of
:func:`dtypedoctor.watch`. ``dtypedoctor.DtypeDoctorCallback`` and ``dtypedoctor.LightningCallback`` are the same.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtypedoctor.inprocess.callback import DtypeDoctorCallback as TrainerCallback

__all__ = ["TrainerCallback"]  # Lightning's is not in it: ``import *`` would need Lightning

_NAMES = {"TrainerCallback": "DtypeDoctorCallback", "LightningCallback": "LightningCallback"}
"""What the package itself calls them."""


def __getattr__(name: str) -> "Any":
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dtypedoctor

    return getattr(dtypedoctor, _NAMES[name])
