"""The recorded versions as one ``pip install``."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from dtypedoctor import __version__

__all__ = ["install_command"]

_TORCH_INDEX = "https://download.pytorch.org/whl/"
_TORCH_BUILD = re.compile(r"(?P<version>[\w.]+)\+(?P<build>cpu|xpu|cu\d+|rocm[\d.]+)")
"""A version of a package that PyTorch's own index has: a local label names what it was built for, and the folder it lies in
(https://docs.pytorch.org/get-started/locally/)."""


def install_command(environment: Mapping[str, Any]) -> str:
    """``pip install`` of dtypedoctor and of the recorded versions.

    Builds of torch are taken from the index that has them, because a CPU build and a CUDA build do not compute the same.
    Of other local labels (``+git1a2b3c4``), which no index knows, only the version is kept.
    """
    recorded = environment.get("versions")
    versions = {name: str(version) for name, version in recorded.items()} if isinstance(recorded, Mapping) else {}
    indices = dict.fromkeys(_indices(versions))
    pins = [f"dtypedoctor=={__version__}", *(f"{name}=={_pinned(version)}" for name, version in versions.items())]
    return shlex.join(["pip", "install", *(f"--extra-index-url={index}" for index in indices), *pins])


def _indices(versions: Mapping[str, str]) -> Iterator[str]:
    for version in versions.values():
        if build := _TORCH_BUILD.fullmatch(version):
            nightly = "nightly/" if ".dev" in build["version"] else ""
            yield f"{_TORCH_INDEX}{nightly}{build['build']}"


def _pinned(version: str) -> str:
    return version if _TORCH_BUILD.fullmatch(version) else version.split("+")[0]
