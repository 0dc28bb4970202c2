"""Operators that return nothing and fill memory that they were given, as bitsandbytes' CUDA kernels do."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.trace.events import Op
from dtypedoctor.trace.model import Trace


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

Fill = Callable[[Tensor, Tensor, torch.dtype, Tensor], None]


def fill_unseen(packed: Tensor, absmax: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """Fills memory as a C library does: no operator writes to it."""
    state = QuantState(absmax, shape=out.shape, blocksize=64, quant_type="nf4", dtype=dtype)
    state.code = CODE
    dense = dequantize_4bit(packed, state).contiguous()
    ctypes.memmove(out.data_ptr(), dense.data_ptr(), out.nbytes)


class Projection(nn.Module):
    """Multiplies with its packed weight, dequantised into shared memory that was made before, typed as ``read``.

    ``kept`` says where that memory is kept: in a ``global``, in an ``attribute`` or in a registered ``buffer``.
    """

    def __init__(self, fill: Fill, read: torch.dtype, kept: str) -> None:
        super().__init__()
        packed, state = quantize_4bit(torch.randn(64, 64, dtype=torch.float16), quant_type="nf4")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.quant_state = state
        memory = torch.zeros(64 * 64, dtype=read)
        BUFFERS["cpu"] = memory
        if kept == "attribute":
            self.memory = memory
        if kept == "buffer":
            self.register_buffer("memory", memory)
        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.quant_state
        memory = BUFFERS["cpu"]
        self.fill(self.weight, state.absmax, state.dtype, memory.view(state.dtype).view(64, 64))
        return x @ memory.view(64, 64).t()


def multiplied(net: Projection, folder: Path) -> Trace:
    x = torch.randn(3, 64, dtype=torch.float16)

    def work(_: object) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            net(x)

    return watched(folder, work, traced=True)


WRONG, RIGHT = (torch.bfloat16, ["stale-dequant-buffer"]), (torch.float16, [])


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("kept", ["global", "attribute", "buffer"])
@pytest.mark.parametrize(("read", "found"), [WRONG, RIGHT])
def test_garbage_in_filled_memory_is_traced_back_to_the_packed_weight(
    fill: torch._ops.OpOverload, read: torch.dtype, found: list[str], kept: str, tmp_path: Path
) -> None:
    """Wherever it is kept; under autocast nothing raises; in memory of the state's own dtype there is nothing to find."""
    trace = multiplied(Projection(fill, read, kept), tmp_path)
    assert [finding.id for finding in diagnose(trace)] == found
    [op] = [op for op in trace.all(Op) if "dequantize_into" in op.op]
    assert op.out_variant
    assert [(note.dtype, note.shape) for note in op.outputs] == [("float16", [64, 64])]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("kept", ["global", "attribute", "buffer"])
@pytest.mark.parametrize(("read", "found"), [WRONG, RIGHT])
def test_memory_that_is_filled_unseen_is_told_by_its_values(
    read: torch.dtype, found: list[str], kept: str, tmp_path: Path
) -> None:
    """Nothing that the trace shows has written to it, and what holds it has a name of its own."""
    trace = multiplied(Projection(fill_unseen, read, kept), tmp_path)
    findings = diagnose(trace)
    assert [finding.id for finding in findings] == found
    assert all("The same bits read as float16 are the weight." in finding.evidence for finding in findings)


def test_another_matrix_of_the_same_shape_is_not_taken_for_the_weight(tmp_path: Path) -> None:
    """A bfloat16 matrix that a module keeps beside its packed float16 weight is what it is."""

    class Rotated(Projection):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.memory.view(64, 64)

    net = Rotated(fill_unseen, torch.bfloat16, "buffer")
    nn.init.normal_(net.memory)
    assert diagnose(multiplied(net, tmp_path)) == ()


def test_an_operand_beside_memory_that_is_misread_is_not_taken_for_it(tmp_path: Path) -> None:
    """A dense float16 matrix of the shape of the weight, multiplied in the same call, before the weight."""

    class Beside(Projection):
        def __init__(self) -> None:
            super().__init__(fill_unseen, torch.bfloat16, "global")
            self.mixing = nn.Parameter(torch.randn(64, 64, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ self.mixing)

    [finding] = diagnose(multiplied(Beside(), tmp_path))
    assert (finding.id, finding.dtype) == ("stale-dequant-buffer", "bfloat16")


class Inferred(Projection):
    """Dequantizes a weight around 0.02 in inference mode into memory that is larger than it needs, and uses it in some way."""

    def __init__(self, state: torch.dtype, read: torch.dtype, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(fill_unseen, read, "global")
        packed, self.weight.quant_state = quantize_4bit(torch.randn(64, 64, dtype=state) * 0.02, quant_type="nf4")
        self.weight.data = packed
        self.use = use
        with torch.inference_mode():
            BUFFERS["larger"] = torch.zeros(2 * 64 * 64, dtype=read)

    @torch.inference_mode()
    def dense(self) -> Tensor:
        state = self.weight.quant_state
        memory = BUFFERS["larger"][: 64 * 64].view(64, 64)
        self.fill(self.weight, state.absmax, state.dtype, memory.view(state.dtype))
        return memory

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.dense())


def joined(w: Tensor) -> Tensor:
    """The weight twice, one below the other; float16 autocast raises where it has to join bfloat16 tensors."""
    with torch.autocast("cpu", enabled=False):
        return torch.cat([w, w])


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cast by autocast": lambda x, w: x @ w.t(),
    "cast by name": lambda x, w: x @ w.to(x.dtype).t(),
    "cast like another": lambda x, w: x @ w.t().type_as(x),
    "copied into its dtype": lambda x, w: x @ torch.empty(64, 64, dtype=x.dtype).copy_(w),
    "joined": lambda x, w: x @ joined(w).t().to(x.dtype),
    "scaled": lambda x, w: x @ (w * 0.5).to(x.dtype),
    "a linear layer": lambda x, w: nn.functional.linear(x, w),
}
"""Ways to the product that has no bits of the weight left in its operand where float16 makes 0 of 1e-16."""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("use", USES)
def test_bits_that_a_cast_destroys_are_seen_before_the_cast(use: str, tmp_path: Path) -> None:
    """In both orders, as a view of a larger buffer that was made in inference mode; in memory of its own dtype nothing is said."""
    for state, read, found in (
        (torch.float16, torch.bfloat16, ["stale-dequant-buffer"]),
        (torch.bfloat16, torch.float16, ["stale-dequant-buffer"]),
        (torch.float16, torch.float16, []),
        (torch.bfloat16, torch.bfloat16, []),
    ):
        folder = tmp_path / f"{state}-{read}"
        folder.mkdir()
        net, x = Inferred(state, read, USES[use]), torch.randn(3, 64, dtype=state)

        def work(_: object, net: nn.Module = net, x: Tensor = x) -> None:
            with torch.autocast("cpu", dtype=x.dtype):
                net(x)

        findings = [
            finding for finding in diagnose(watched(folder, work, traced=True)) if finding.severity is not Severity.INFO
        ]
        assert [finding.id for finding in findings] == found, (state, read)
        assert all(finding.source.startswith("test_filled_memory.py") for finding in findings)
