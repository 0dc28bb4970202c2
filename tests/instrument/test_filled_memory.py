"""Operators that return nothing and fill memory that they were given, as bitsandbytes' CUDA kernels do."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument.op_windows import OpWindow
from dtypedoctor.trace.events import Op

WINDOW = OpWindow(call=1, step=0, until="next-call")


@pytest.fixture
def fill() -> Iterator[torch._ops.OpOverload]:
    """An operator with the signature of bitsandbytes' own `.out` form, which exists on CUDA only."""
    with torch.library._scoped_library("dtypedoctor_test", "DEF") as library:
        library.define("dequantize_into(Tensor packed, Tensor absmax, ScalarType dtype, Tensor! out) -> ()")

        def run(packed: Tensor, absmax: Tensor, dtype: torch.dtype, out: Tensor) -> None:
            state = QuantState(absmax, shape=out.shape, blocksize=64, quant_type="nf4", dtype=dtype)
            state.code = CODE
            out.copy_(dequantize_4bit(packed, state))

        library.impl("dequantize_into", run, "CPU")
        yield torch.ops.dtypedoctor_test.dequantize_into.default


CODE = quantize_4bit(torch.ones(64, 64), quant_type="nf4")[1].code
BUFFERS: dict[str, Tensor] = {}
"""Shared memory as libraries keep it, by device."""


class Projection(nn.Module):
    """Multiplies with its packed weight, dequantised into shared memory that was made before, typed as ``read``."""

    def __init__(self, fill: torch._ops.OpOverload, read: torch.dtype) -> None:
        super().__init__()
        packed, state = quantize_4bit(torch.randn(64, 64, dtype=torch.float16), quant_type="nf4")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.quant_state = state
        BUFFERS["cpu"] = torch.zeros(64 * 64, dtype=read)
        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.quant_state
        memory = BUFFERS["cpu"]
        self.fill(self.weight, state.absmax, state.dtype, memory.view(state.dtype).view(64, 64))
        return x @ memory.view(64, 64).t()


@pytest.mark.parametrize(("read", "found"), [(torch.bfloat16, ["stale-dequant-buffer"]), (torch.float16, [])])
def test_garbage_in_filled_memory_is_traced_back_to_the_packed_weight(
    fill: torch._ops.OpOverload, read: torch.dtype, found: list[str], tmp_path: Path
) -> None:
    """Under autocast nothing raises; where the memory has the state's own dtype there is nothing to find."""
    net = Projection(fill, read)
    x = torch.randn(3, 64, dtype=torch.float16)

    def work(_: object) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            net(x)

    trace = watched(tmp_path, work, WINDOW)
    assert [finding.id for finding in diagnose(trace)] == found
    [op] = [op for op in trace.all(Op) if "dequantize_into" in op.op]
    assert op.out_variant
    assert [(note.dtype, note.shape) for note in op.outputs] == [("float16", [64, 64])]
