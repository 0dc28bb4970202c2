"""Multiplies with a packed weight whose quantization state says another dtype than the activations, through a released unsloth.

    python unsloth_states.py FOLDER

FOLDER is an unpacked wheel, or ``-`` for the unsloth on ``sys.path``. Prints a line for each pair of dtypes and each use: the relative error of
the result (of the input's gradient for ``backward``) against float32, or the error that was raised. A single token is decoded on CUDA only.
"""

import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import unsloth_kernels

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
PAIRS = (("float16", "bfloat16"), ("bfloat16", "float16"), ("float32", "bfloat16"))
USES = ("forward", "backward", "decode two", "decode one")


def main(folder: str) -> None:
    """Tries each use, without autocast and under that of the activations' dtype."""
    utils, lora = unsloth_kernels.load(folder)
    for (state, activations), autocast, use in product(PAIRS, (False, True), USES):
        if use == "decode one" and DEVICE.type == "cpu":
            continue
        dtype = getattr(torch, activations)
        utils.WEIGHT_BUFFERS[DEVICE.index] = utils.ABSMAX_BUFFERS[DEVICE.index] = (
            None  # another failure: scenario unsloth_two_loads
        )
        with torch.autocast(DEVICE.type, dtype=dtype) if autocast else nullcontext():
            try:
                found = f"error {relative_error(utils, lora, getattr(torch, state), dtype, use):.4f}"
            except RuntimeError as raised:
                found = str(raised).splitlines()[0]
        print(f"state {state}", activations, "autocast" if autocast else "plain", use, found, sep="\t")


def relative_error(utils: Any, lora: Any, state_dtype: torch.dtype, dtype: torch.dtype, use: str) -> float:
    """How far a product, or its gradient, is from that with the weight in float32."""
    torch.manual_seed(0)
    packed, state = bnb.quantize_4bit(torch.randn(256, 128, device=DEVICE), quant_type="nf4", compress_statistics=True)
    weight = bnb.dequantize_4bit(packed, state).float()
    state.dtype = state_dtype
    x = torch.randn(2, 3, 128, device=DEVICE).to(dtype).requires_grad_()
    if use == "backward":
        a, b = (torch.zeros(size, device=DEVICE, dtype=dtype, requires_grad=True) for size in ((4, 128), (256, 4)))
        lora.LoRA_W.apply(x, packed, state, a, b, 1.0).float().sum().backward()
        assert x.grad is not None
        return distance(x.grad, torch.ones(2, 3, 256, device=DEVICE), weight.t())
    with torch.no_grad():
        if use == "forward":
            return distance(utils.matmul_lora(x, packed, state, None, None, None), x, weight)
        token = x[: 2 if use == "decode two" else 1, :1].contiguous()
        return distance(utils.fast_linear_forward(projection(packed, state), token), token, weight)


def projection(packed: Tensor, state: Any) -> Any:
    """What unsloth reads of a linear layer."""
    layer: Any = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.weight.quant_state = state
    layer.disable_adapters, layer.merged = True, False
    return layer


def distance(found: Tensor, x: Tensor, weight: Tensor) -> float:
    """The relative error against the product in float32, whatever region is open."""
    with torch.autocast(DEVICE.type, enabled=False):
        expected = x.float() @ weight.t()
        return float((found.float() - expected).norm() / expected.norm())


if __name__ == "__main__":
    main(sys.argv[1])
