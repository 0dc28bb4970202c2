"""Code that computes on tensors without being made of torch's operators: no instrument sees inside."""

import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from dtypedoctor._torch_private import defined_operators

WHY = "what it reads and writes passes no operator of torch; what watched modules return was watched"

_TRITON = "triton.runtime.jit"
_KERNEL_CLASSES = frozenset({"JITFunction", "InterpretedFunction", "Autotuner", "Heuristics"})
_NOT_THE_PROGRAMS = frozenset({"torch", "triton", "dtypedoctor"})
_TORCHS_NAMESPACES = frozenset(
    {
        "aten", "c10d", "c10d_functional", "cplib", "debug_mode_ops", "debugprims", "export", "flex_lib", "fsdp", "inductor",
        "mkl", "mkldnn", "onednn", "onnx", "onnx_symbolic", "prim", "prims", "profiler", "quantized", "quantized_decomposed",
        "rngprims", "sparse", "streams", "symm_mem", "triton",
    }
)  # fmt: skip
"""Namespaces of operators that torch itself defines from Python, in 2.9 to 2.13; those with a leading underscore besides."""


def own_kernels(libraries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each kind of such code that the process has loaded, in words, and why it is not watched.

    That it is loaded can be seen; whether it ever ran cannot.

    Args:
        libraries: names of the C libraries that were loaded by ctypes.
    """
    for what, found in (
        ("C code loaded by ctypes", sorted(libraries)),
        ("C++ operators", sorted(Path(str(path)).name for path in torch.ops.loaded_libraries)),
        ("compiled extension modules", sorted(_extension_modules())),
        ("Triton kernels", _counted(_triton_kernels())),
    ):
        if found:
            yield f"{what} ({', '.join(found)})", WHY
    if operators := _counted(_operators()):
        yield f"the inside of custom operators ({', '.join(operators)})", "an operator is one step for every instrument"


def _operators() -> Iterator[str]:
    """Namespace of each operator that was defined from Python and is not torch's own."""
    for name in defined_operators():
        namespace = str(name).partition("::")[0]
        if namespace not in _TORCHS_NAMESPACES and not namespace.startswith("_"):
            yield namespace


def _triton_kernels() -> Iterator[str]:
    """Package of each Triton kernel that a loaded module holds under a name of its own."""
    if _TRITON not in sys.modules:
        return
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package in _NOT_THE_PROGRAMS:
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            cls = type(value)
            if cls.__name__ in _KERNEL_CLASSES and cls.__module__.startswith("triton.runtime"):
                yield package


def _extension_modules() -> Iterator[str]:
    """Modules of machine code that are part of no installed package: what a program has built for itself."""
    folders = [path for key, path in sysconfig.get_paths().items() if key.endswith("lib")]
    installed = (*folders, str(Path(torch.__file__).parents[1]), sys.base_prefix)
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        compiled = isinstance(origin, str) and origin.endswith(tuple(EXTENSION_SUFFIXES))
        if compiled and not str(origin).startswith(installed):
            yield name


def _counted(names: Iterable[str]) -> list[str]:
    return [f"{name}: {count}" for name, count in sorted(Counter(names).items())]
