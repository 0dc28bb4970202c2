"""Loads patches of a released unsloth_zoo, none of their source changed, on a GPU or on a CPU alone.

unsloth_zoo's package wants a GPU and unsloth beside it; the files that make its patches (``temporary_patches/*.py``) need neither. Around
them stand empty packages, and what they import is their own or an installed library.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import torch


def apply(folder: str, *patches: str) -> None:
    """Makes patches as ``import unsloth`` does, which takes what raises nothing for made.

    Args:
        folder: an unpacked wheel, which holds ``unsloth_zoo``; ``-`` takes the one that is on ``sys.path``.
        patches: each ``file.function`` of ``unsloth_zoo/temporary_patches``.

    Raises:
        ModuleNotFoundError: it is not there.
    """
    found = PathFinder.find_spec("unsloth_zoo", None if folder == "-" else [folder])
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no package unsloth_zoo in {'sys.path' if folder == '-' else folder}")
    if not torch.cuda.is_available():
        os.environ.setdefault("UNSLOTH_COMPILE_DISABLE", "1")  # the same mathematics; compiling for a CPU takes minutes
    for name in ("unsloth_zoo", "unsloth_zoo.temporary_patches"):
        package = ModuleType(name)
        package.__path__ = [str(Path(found.origin).parents[1] / name.replace(".", "/"))]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(package).update(DEVICE_TYPE="cuda", DEVICE_TYPE_TORCH="cuda", DEVICE_COUNT=1)
        sys.modules[name] = package
    for patch in patches:
        file, _, function = patch.partition(".")
        getattr(importlib.import_module(f"unsloth_zoo.temporary_patches.{file}"), function, _absent)()


def _absent() -> None:
    """In the place of a patch that this release does not have yet."""
