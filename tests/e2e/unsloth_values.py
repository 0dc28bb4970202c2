"""Dequantizes and multiplies through a released unsloth's own kernels, two dtypes after one another in both orders.

    python unsloth_values.py FOLDER

FOLDER is an unpacked wheel. Prints a line for each order, with and without autocast: the number of weights that differ in any bit from
bitsandbytes' own, or the error that was raised, and a digest of the outputs and gradients of a projection with LoRA.
"""

import hashlib
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios" / "real" / "programs"))
import unsloth_kernels

SIZES = ((64, 64), (64, 128), (128, 64))
"""Rows of whole blocks: of others bitsandbytes' own dequantization on a CPU is wrong."""


def main(folder: str) -> None:
    """Tries each order with buffers that nobody has used."""
    utils, lora = unsloth_kernels.load(folder)
    for order, autocast in product((("bfloat16", "float16"), ("float16", "bfloat16")), (False, True)):
        utils.WEIGHT_BUFFERS, utils.ABSMAX_BUFFERS = {None: None}, {None: None}
        digest, wrong = hashlib.sha256(), 0
        for name in (*order, order[0]):
            dtype = getattr(torch, name)
            with torch.autocast("cpu", dtype=dtype) if autocast else nullcontext():
                try:
                    wrong += different_weights(utils, dtype)
                    for tensor in projection(lora, dtype):
                        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
                except RuntimeError as error:
                    wrong = str(error)
                    break
        print(*order, "autocast" if autocast else "plain", wrong, digest.hexdigest()[:16], sep="\t")


def different_weights(utils: Any, dtype: torch.dtype) -> int:
    """How many elements of dequantized weights are not bitwise those of bitsandbytes, or are of another dtype."""
    different = 0
    for size in SIZES:
        packed, state = quantized(size, dtype)
        dense, expected = (
            utils.fast_dequantize(packed, state, use_global_buffer=True),
            bnb.dequantize_4bit(packed, state),
        )
        same = dense.dtype == expected.dtype
        different += int((dense.view(torch.int16) != expected.view(torch.int16)).sum()) if same else dense.numel()
    return different


def quantized(size: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Any]:
    """A packed weight with packed statistics."""
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size[0])).to(dtype)
    return bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)


def projection(lora: Any, dtype: torch.dtype) -> list[Tensor]:
    packed, state = quantized((64, 64), dtype)
    make = torch.Generator().manual_seed(1)
    x, a, b = (torch.randn(size, generator=make).to(dtype).requires_grad_() for size in ((2, 3, 64), (4, 64), (64, 4)))
    out = lora.LoRA_W.apply(x, packed, state, a, b, 2.0)
    out.float().square().sum().backward()
    return [out.detach(), *(part.grad for part in (x, a, b) if part.grad is not None)]


if __name__ == "__main__":
    main(sys.argv[1])
