"""Trains an NF4 model with LoRA under torch.compile, whose weights come from the dequantizer of the axolotl that is installed.

The widths of the layers differ, so that the compiler meets several shapes. Prints the losses, what Dynamo counted, and in how many
weights axolotl's values differ from those of bitsandbytes. On a CPU, the CUDA functions of bitsandbytes' library are its CPU functions,
called with the same addresses; the streams are null.
"""

import ctypes
from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
HIDDEN, VOCABULARY = 64, 256
WIDTHS = ((32, 64), (64, 128), (16, 192), (32, 256))
"""Of keys and values, and of the MLP; whole blocks of 64, of others bitsandbytes' own dequantization on a CPU is wrong."""


def serve_cpu() -> None:
    """Puts C functions with the names and arguments of the CUDA ones into bitsandbytes' library."""
    library = bitsandbytes.functional.lib
    native = library._lib
    arguments = [*[ctypes.c_void_p] * 4, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    pointer = ctypes.CFUNCTYPE(None, *arguments)

    def statistics(code: int, packed: int, absmax: int, out: int, block: int, numel: int, stream: int) -> None:
        sizes = ctypes.c_longlong(block), ctypes.c_longlong(numel)
        native.cdequantize_blockwise_cpu_fp32(*map(ctypes.c_void_p, (code, packed, absmax, out)), *sizes)

    def nf4(function: Any) -> Any:
        def dequantize(code: int, packed: int, absmax: int, out: int, block: int, numel: int, stream: int) -> None:
            sizes = map(ctypes.c_longlong, (block, 1, numel))
            function(*map(ctypes.c_void_p, (packed, absmax, out)), *sizes)

        return dequantize

    library.cdequantize_blockwise_fp32 = pointer(statistics)
    for name in ("fp16", "bf16", "fp32"):
        function = getattr(native, f"cdequantize_blockwise_cpu_nf4_{name}")
        setattr(library, f"cdequantize_blockwise_{name}_nf4", pointer(nf4(function)))
    torch.cuda.current_stream = lambda device=None: ctypes.c_void_p(0)  # type: ignore[assignment, return-value]
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]


if DEVICE.type == "cpu":
    serve_cpu()
from axolotl.kernels.quantize import dequantize


class LoraLinear(nn.Module):
    """``y = x W + (x A) B`` with W packed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        dense = torch.randn(outputs, inputs).mul_(inputs**-0.5).to(DTYPE)
        packed: Any = bitsandbytes.nn.Params4bit(dense, requires_grad=False, compress_statistics=True, quant_type="nf4")
        self.weight = packed.to(DEVICE)  # packs
        self.a = nn.Parameter(torch.randn(inputs, 4).mul_(inputs**-0.5).to(DEVICE, DTYPE))
        self.b = nn.Parameter(torch.zeros(4, outputs, dtype=DTYPE, device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return x @ dequantize(self.weight.t(), self.weight.quant_state) + (x @ self.a) @ self.b


class Layer(nn.Module):
    """Attention with one head and a gated MLP."""

    def __init__(self, kv: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, dtype=DTYPE).requires_grad_(False)
        self.query, self.key, self.value = LoraLinear(HIDDEN, HIDDEN), LoraLinear(HIDDEN, kv), LoraLinear(HIDDEN, kv)
        self.gate, self.up, self.down = LoraLinear(HIDDEN, inner), LoraLinear(HIDDEN, inner), LoraLinear(inner, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        normed = self.norm(x)
        query, key, value = self.query(normed), self.key(normed), self.value(normed)
        repeats = query.shape[-1] // key.shape[-1]
        x = x + scaled_dot_product_attention(query, key.repeat(1, 1, repeats), value.repeat(1, 1, repeats))
        normed = self.norm(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


def main() -> None:
    """Trains for three steps."""
    torch.manual_seed(0)
    ends = nn.Embedding(VOCABULARY, HIDDEN, dtype=DTYPE), nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=DTYPE)
    model = nn.Sequential(
        ends[0].requires_grad_(False), *(Layer(*width) for width in WIDTHS), ends[1].requires_grad_(False)
    ).to(DEVICE)
    ids = torch.randint(0, VOCABULARY, (2, 16), device=DEVICE)
    model(ids)  # axolotl 0.18 looks for torchao in its first call, at which a graph would break
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for _ in range(3):
        loss = cross_entropy(compiled(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
    counters = torch._dynamo.utils.counters
    print("breaks", sum(counters["graph_break"].values()))
    print("graphs", counters["stats"]["unique_graphs"])
    layer: Any = model[1]
    print("different", sum(different(one.weight) for one in (layer.query, layer.key, layer.gate, layer.down)))


def different(weight: Any) -> bool:
    """Whether compiled code gets another weight than bitsandbytes makes of it."""
    got = torch.compile(dequantize, backend="eager")(weight, weight.quant_state)
    return not torch.equal(got, bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state))


main()
