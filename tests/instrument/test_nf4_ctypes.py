"""NF4 through the C functions: equality with bitsandbytes, the operator, the stream it launches on, the corrections."""

from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.tickets import nf4_ctypes
from dtypedoctor.lab.tickets.nf4_compiled import Nf4CompiledConfig, build_nf4_compiled, install_stream_per_call
from dtypedoctor.lab.worker.stage import watching_streams

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def packed(
    dtype: torch.dtype = torch.bfloat16, *, nested: bool = True, shape: tuple[int, int] = (96, 64), device: str = "cpu"
) -> tuple[Tensor, QuantState]:
    """A random matrix in NF4."""
    torch.manual_seed(0)
    dense = torch.randn(shape, dtype=dtype, device=device)
    weight, state = quantize_4bit(dense, quant_type="nf4", compress_statistics=nested)
    return weight, state


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [nf4_ctypes.dequantize, nf4_ctypes.dequantize_compile_safe])
@pytest.mark.parametrize("shape", [(96, 64), (33, 128), (1, 640)])
def test_both_forms_equal_bitsandbytes_bit_for_bit(
    form: object, dtype: torch.dtype, nested: bool, shape: tuple[int, int]
) -> None:
    """Plain and transposed, by value; statistics nested or not."""
    assert callable(form)
    weight, state = packed(dtype, nested=nested, shape=shape)
    wanted = dequantize_4bit(weight, state)
    assert wanted.dtype == dtype
    assert torch.equal(form(weight, state), wanted)
    assert torch.equal(form(weight.t(), state), wanted.t())


def test_torch_accepts_the_operator() -> None:
    """Schema, fake tensors and tracing with dynamic shapes, by torch's own checks."""
    for nested in (False, True):
        weight, state = packed(nested=nested)
        arguments = (weight, *nf4_ctypes._parts(state))
        results = torch.library.opcheck(torch.ops.dtypedoctor.nf4_dequantize.default, arguments)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("nested", [False, True])
def test_the_corrected_form_compiles_as_one_graph(nested: bool) -> None:
    """No break is tolerated under fullgraph, and the values are those of eager mode."""
    weight, state = packed(nested=nested)
    compiled = torch.compile(nf4_ctypes.dequantize_compile_safe, backend="eager", fullgraph=True)
    assert torch.equal(compiled(weight.t(), state), dequantize_4bit(weight, state).t())


@pytest.mark.parametrize("form", [nf4_ctypes.dequantize, nf4_ctypes.dequantize_compile_safe])
def test_what_the_c_functions_would_misread_is_refused(form: object) -> None:
    """They check nothing themselves: each of these would give wrong values or leave the memory."""
    assert callable(form)
    weight, state = packed()
    with pytest.raises(ValueError, match="packed elements are not a matrix"):
        form(weight[:-1], state)
    with pytest.raises(ValueError, match="float64"):
        form(weight, _with(state, dtype=torch.float64))
    with pytest.raises(ValueError, match="blocks of 2048"):
        form(weight, _with(state, blocksize=2048))
    with pytest.raises(ValueError, match="65 columns"):
        form(*packed(shape=(64, 65)))
    with pytest.raises(ValueError, match="not an NF4 matrix: nf4 of shape"):
        form(*quantize_4bit(torch.randn(256), quant_type="nf4"))
    with pytest.raises(ValueError, match="not an NF4 matrix: fp4"):
        form(*quantize_4bit(torch.randn(64, 64), quant_type="fp4"))
    with pytest.raises(ValueError, match="reordered"):
        form(weight, _with(state, packing_format_for_cpu=True))


def _with(state: QuantState, **changes: object) -> QuantState:
    changed = QuantState.__new__(QuantState)
    vars(changed).update(vars(state) | changes)
    return changed


def test_sizes_that_do_not_fit_are_refused() -> None:
    """One width of keys and values per layer, each a divisor of the hidden size."""
    with pytest.raises(UsageError, match="kv_sizes"):
        Nf4CompiledConfig(kv_sizes=[32], intermediate_sizes=[96, 128])
    with pytest.raises(UsageError, match="kv_sizes"):
        Nf4CompiledConfig(kv_sizes=[48], intermediate_sizes=[96])


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Current stream handle per device; stands for CUDA's bookkeeping, which a CPU does not have."""
    current = {"cuda:0": 11, "cuda:1": 22}
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=current[str(device)], device=device)
    )
    monkeypatch.setattr(nf4_ctypes, "_process_stream", None)
    return current


def test_the_watch_tells_stale_launches_from_others(streams: dict[str, int]) -> None:
    """Each use with both handles, and the function is put back."""
    original = nf4_ctypes.launch_stream
    with watching_streams(nf4_ctypes, "launch_stream") as launches:
        nf4_ctypes.launch_stream(torch.device("cuda:0"))
        streams["cuda:0"] = 12
        nf4_ctypes.launch_stream(torch.device("cuda:0"))
        nf4_ctypes.launch_stream(torch.device("cuda:0"))
    assert nf4_ctypes.launch_stream is original
    assert launches == {("cuda:0", 11, 12): 2, ("cuda:0", 11, 11): 1}


def test_the_stream_correction_leaves_nothing_stale(streams: dict[str, int]) -> None:
    """It counts each launch that it directed."""
    installed = install_stream_per_call(build_nf4_compiled(Nf4CompiledConfig()), ())
    try:
        with watching_streams(nf4_ctypes, "launch_stream") as launches:
            for handle in (11, 12, 13):
                streams["cuda:0"] = handle
                nf4_ctypes.launch_stream(torch.device("cuda:0"))
    finally:
        installed.undo()
    assert launches == {("cuda:0", handle, handle): 1 for handle in (11, 12, 13)}
    assert installed.counters.hits == 3


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_cuda_both_forms_equal_bitsandbytes(dtype: torch.dtype, nested: bool) -> None:
    """The same equality through the CUDA functions."""
    weight, state = packed(dtype, nested=nested, device="cuda")
    wanted = dequantize_4bit(weight, state)
    for form in (nf4_ctypes.dequantize, nf4_ctypes.dequantize_compile_safe):
        assert torch.equal(form(weight, state), wanted)
        assert torch.equal(form(weight.t(), state), wanted.t())


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_a_second_stream_is_stale_until_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call pins the default stream; inside another stream the launch goes to the pinned one."""
    monkeypatch.setattr(nf4_ctypes, "_process_stream", None)
    weight, state = packed(device="cuda")
    nf4_ctypes.dequantize(weight, state)
    with watching_streams(nf4_ctypes, "launch_stream") as launches, torch.cuda.stream(torch.cuda.Stream()):
        nf4_ctypes.dequantize(weight, state)
    assert [used != current for _, used, current in launches] == [True]
