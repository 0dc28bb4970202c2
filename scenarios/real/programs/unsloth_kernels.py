"""Loads the fused kernels of a released unsloth wheel, none of their source changed, on a GPU or on a CPU alone.

unsloth's package refuses to be imported without a GPU and without its companions; the files that matter here
(``kernels/utils.py``, ``kernels/fast_lora.py``) need neither. Around them stand empty packages. On a CPU Triton is a stub
that compiles nothing, and the CUDA functions of bitsandbytes' library are its CPU functions, called with the same addresses.
"""

import ctypes
import importlib
import logging
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import bitsandbytes
import torch
from packaging.version import Version


class _Stub(ModuleType):
    """A module that has every attribute, each of them callable; called with one function alone, it returns that function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Stub(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # @triton.jit
        return lambda function=None, *_, **__: function  # @triton.heuristics(...)


def load(folder: str) -> tuple[Any, Any]:
    """unsloth's own ``kernels.utils`` and ``kernels.fast_lora``.

    Args:
        folder: an unpacked wheel, which holds ``unsloth/kernels``; ``-`` takes the unsloth that is on ``sys.path``.

    Raises:
        ModuleNotFoundError: it is not there.
    """
    found = PathFinder.find_spec("unsloth", None if folder == "-" else [folder])
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no package unsloth in {'sys.path' if folder == '-' else folder}")
    on_cpu = not torch.cuda.is_available()
    os.environ.setdefault(
        "UNSLOTH_BNB_TRITON", "0"
    )  # later releases: bitsandbytes' functions and not their own Triton kernels
    if on_cpu:
        _stub_triton()
    _put("unsloth_zoo", _Stub("unsloth_zoo"))
    _put("unsloth_zoo.utils", _Stub("unsloth_zoo.utils"), Version=lambda version: Version(str(version)))
    _put("unsloth_zoo.log", _Stub("unsloth_zoo.log"), logger=logging.getLogger("unsloth_zoo"))
    _put("unsloth_zoo.temporary_patches", _Stub("unsloth_zoo.temporary_patches"))
    _put("unsloth_zoo.temporary_patches.common", _Stub("common"), torch_compile=_Stub("torch_compile"))
    device = {"is_hip": lambda: False, "get_device_type": lambda: "cuda", "DEVICE_TYPE": "cuda", "DEVICE_TYPE_TORCH": "cuda",
              "DEVICE_COUNT": 1, "ALLOW_PREQUANTIZED_MODELS": True, "ALLOW_BITSANDBYTES": True}  # fmt: skip
    for name in ("unsloth", "unsloth.kernels"):
        _put(name, ModuleType(name), __path__=[str(Path(found.origin).parents[1] / name.replace(".", "/"))], **device)
    _put("unsloth.device_type", ModuleType("unsloth.device_type"), **device)
    if on_cpu:  # a build for CUDA has the function, which raises without a driver
        torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]
    utils: Any = importlib.import_module("unsloth.kernels.utils")
    if on_cpu:
        _serve_cpu(utils)
    return utils, importlib.import_module("unsloth.kernels.fast_lora")


def _put(name: str, module: ModuleType, **values: Any) -> None:
    vars(module).update(values)
    module.__path__ = vars(module).get("__path__", [])
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module


def _stub_triton() -> None:
    _put("triton", _Stub("triton"), __version__="3.6.0", cdiv=lambda a, b: -(-a // b))
    for name in ("triton.language", "triton.language.extra", "triton.language.extra.libdevice"):
        _put(name, _Stub(name))


def _serve_cpu(utils: Any) -> None:
    """Streams, buffers and C functions of "the device with index None", which is the CPU."""
    utils.CUDA_STREAMS = {None: ctypes.c_void_p(0)}
    utils.WEIGHT_BUFFERS, utils.ABSMAX_BUFFERS = {None: None}, {None: None}
    utils._can_use_scratch = lambda device: True
    utils._get_tensor_stream = lambda tensor: ctypes.c_void_p(0)
    utils.torch_amp_custom_fwd = torch.amp.custom_fwd(device_type="cpu")
    utils.torch_amp_custom_bwd = torch.amp.custom_bwd(device_type="cpu")
    library = bitsandbytes.functional.lib
    library = getattr(library, "_lib", library)

    def statistics(code: Any, packed: Any, absmax: Any, out: Any, block: Any, numel: Any, stream: Any) -> None:
        sizes = ctypes.c_longlong(block.value), ctypes.c_longlong(numel.value)
        library.cdequantize_blockwise_cpu_fp32(code, packed, absmax, out, *sizes)

    def nf4(symbol: str) -> Any:
        def dequantize(code: Any, packed: Any, absmax: Any, out: Any, block: Any, numel: Any, stream: Any) -> None:
            sizes = (ctypes.c_longlong(size) for size in (block.value, 1, numel.value))
            getattr(library, symbol)(packed, absmax, out, *sizes)

        return dequantize

    utils.cdequantize_blockwise_fp32 = statistics
    utils.cdequantize_blockwise_fp16_nf4 = nf4("cdequantize_blockwise_cpu_nf4_fp16")
    utils.cdequantize_blockwise_bf16_nf4 = nf4("cdequantize_blockwise_cpu_nf4_bf16")
