"""NF4 through the C functions: equality with bitsandbytes, the operator, the stream it launches on, the corrections."""

import ctypes
import importlib
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode

from dtypedoctor.corrections.contract import TargetMismatchError
from dtypedoctor.errors import UsageError
from dtypedoctor.tickets.nf4_compiled import nf4_ctypes
from dtypedoctor.tickets.nf4_compiled.model import (
    Nf4CompiledConfig,
    Nf4CompiledForCausalLM,
    Nf4LoraLinear,
    build_nf4_compiled,
    install_custom_op,
    install_stream_per_call,
)
from dtypedoctor.worker.stage import StreamWatch

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


def step(model: Nf4CompiledForCausalLM) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients on a fixed batch."""
    ids = torch.randint(4, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    assert loss is not None
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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


def test_bytes_stored_as_bfloat16_are_bytes_all_the_same() -> None:
    """The storage dtype that FSDP asks for changes how the bytes are typed, not what they are."""
    dense = torch.randn(96, 64, dtype=torch.bfloat16)
    weight, state = quantize_4bit(dense, quant_type="nf4", quant_storage=torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(nf4_ctypes.dequantize_compile_safe(weight, state), dequantize_4bit(weight, state))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_the_float32_reference_within_the_dtypes_rounding(dtype: torch.dtype, nested: bool) -> None:
    """Code book times block maximum, computed here in float64 from the packed nibbles."""
    weight, state = packed(dtype, nested=nested)
    absmax = state.absmax
    if nested:
        inner = state.state2
        blocks = inner.absmax.double().repeat_interleave(inner.blocksize)[: absmax.numel()]
        absmax = inner.code.double()[absmax.int()] * blocks + state.offset.double()
    nibbles = torch.stack((weight.flatten() >> 4, weight.flatten() & 15), dim=1).flatten().int()
    wanted = (state.code.double()[nibbles].view(-1, state.blocksize) * absmax.double()[:, None]).view(state.shape)
    found = nf4_ctypes.dequantize_compile_safe(weight, state).double()
    assert ((found - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + 1e-7).all()


def test_torch_accepts_the_operator() -> None:
    """Schema, fake tensors and tracing with dynamic shapes, by torch's own checks."""
    for nested in (False, True):
        weight, state = packed(nested=nested)
        arguments = (weight, *nf4_ctypes._parts(state))
        results = torch.library.opcheck(torch.ops.dtypedoctor.nf4_dequantize.default, arguments)
        assert set(results.values()) == {"SUCCESS"}


def test_tracing_sees_shape_dtype_and_device_without_running() -> None:
    """The description for fake tensors is that of the real result."""
    weight, state = packed(torch.float16)
    parts = nf4_ctypes._parts(state)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in parts[0]]
        out = torch.ops.dtypedoctor.nf4_dequantize(mode.from_tensor(weight), fakes, *parts[1:])
    assert (tuple(out.shape), out.dtype, out.device.type) == ((96, 64), torch.float16, "cpu")


def test_registering_twice_is_harmless() -> None:
    """By the function, and by importing the module anew."""
    weight, state = packed()
    wanted = dequantize_4bit(weight, state)
    nf4_ctypes.register_operator()
    reloaded = importlib.reload(nf4_ctypes)
    assert torch.equal(torch.ops.dtypedoctor.nf4_dequantize(weight, *reloaded._parts(state)), wanted)
    assert torch.equal(reloaded.dequantize_compile_safe(weight, state), wanted)


def test_an_eager_call_does_not_go_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not pay for the dispatch."""
    calls: list[str] = []
    monkeypatch.setattr(nf4_ctypes, "launches", [lambda: calls.append("run")])
    weight, state = packed()
    with torch.profiler.profile() as profile:
        nf4_ctypes.dequantize_compile_safe(weight, state)
    names = {event.name for event in profile.events()}
    assert not any("nf4_dequantize" in name for name in names)
    assert calls == ["run"]


@pytest.mark.parametrize("nested", [False, True])
def test_the_corrected_form_compiles_as_one_graph(nested: bool) -> None:
    """No break is tolerated under fullgraph, and the values are those of eager mode."""
    weight, state = packed(nested=nested)
    compiled = torch.compile(nf4_ctypes.dequantize_compile_safe, backend="eager", fullgraph=True)
    assert torch.equal(compiled(weight.t(), state), dequantize_4bit(weight, state).t())


def test_the_fast_path_itself_does_not() -> None:
    """Dynamo stops at the first ctypes value."""
    weight, state = packed()
    torch.compiler.reset()
    compiled = torch.compile(nf4_ctypes.dequantize, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"_SimpleCData|PyCSimpleType"):
        compiled(weight, state)
    torch.compiler.reset()


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


def test_the_corrected_model_has_the_same_loss_and_gradients_and_counts_its_launches() -> None:
    """Seven weights in each of three layers; what runs is proven by name."""
    model = build_nf4_compiled(Nf4CompiledConfig())
    before = step(model)
    installed = install_custom_op(model, ())
    try:
        after = step(model)
        assert nf4_ctypes.dequantize is nf4_ctypes.dequantize_compile_safe
    finally:
        installed.undo()
    assert torch.equal(before[0], after[0])
    assert before[1]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert installed.counters.hits == 21
    assert "nf4_ctypes.py:" in installed.proof


def test_the_linear_layer_equals_its_float32_reference_forward_and_backward() -> None:
    """Within bfloat16's rounding of a product over 64 elements."""
    torch.manual_seed(0)
    layer = Nf4LoraLinear(64, 32, rank=4, nested=True, dtype=torch.bfloat16)
    nn.init.normal_(layer.lora_b, std=0.1)
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    dense = dequantize_4bit(layer.weight, layer.weight.quant_state).double()
    a, b = (p.detach().double().requires_grad_() for p in (layer.lora_a, layer.lora_b))
    wanted = wide @ dense.t() + (wide @ a) @ b * layer.scale
    out = layer(x)
    out.sum().backward()
    wanted.sum().backward()
    epsilon = torch.finfo(torch.bfloat16).eps
    assert (out.double() - wanted).norm() <= epsilon * wanted.norm()
    for found, expected in ((x, wide), (layer.lora_a, a), (layer.lora_b, b)):
        assert found.grad is not None
        assert expected.grad is not None
        assert (found.grad.double() - expected.grad).norm() <= 2 * epsilon * expected.grad.norm()


def test_the_corrections_refuse_what_they_are_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without NF4, a fast path of another signature, a second installation."""
    model = build_nf4_compiled(Nf4CompiledConfig())
    for install in (install_custom_op, install_stream_per_call):
        with pytest.raises(TargetMismatchError, match="Linear has no NF4 weight"):
            install(nn.Linear(2, 2), ())
    installed = install_custom_op(model, ())
    try:
        with pytest.raises(TargetMismatchError, match="replaced already"):
            install_custom_op(model, ())
    finally:
        installed.undo()
    monkeypatch.setattr(nf4_ctypes, "dequantize", lambda weight: weight)
    with pytest.raises(TargetMismatchError, match=r"takes \(weight\)"):
        install_custom_op(model, ())


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


def test_the_cached_stream_is_the_first_one_whatever_is_current(streams: dict[str, int]) -> None:
    """Another stream, another device: the same handle; the corrective form asks again."""
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert nf4_ctypes.launch_stream(first).value == 11
    streams["cuda:0"] = 12
    assert (nf4_ctypes.launch_stream(first).value, nf4_ctypes.launch_stream(second).value) == (11, 11)
    assert (nf4_ctypes.current_stream(first).value, nf4_ctypes.current_stream(second).value) == (12, 22)


def test_the_watch_tells_stale_launches_from_others(streams: dict[str, int]) -> None:
    """Each use with both handles, and the function is put back."""
    original = nf4_ctypes.launch_stream
    with StreamWatch(nf4_ctypes, "launch_stream") as watch:
        nf4_ctypes.launch_stream(torch.device("cuda:0"))
        streams["cuda:0"] = 12
        nf4_ctypes.launch_stream(torch.device("cuda:0"))
        nf4_ctypes.launch_stream(torch.device("cuda:0"))
    assert nf4_ctypes.launch_stream is original
    seen = [(use.device, use.used, use.current, use.count, use.stale) for use in watch.uses()]
    assert seen == [("cuda:0", 11, 12, 2, True), ("cuda:0", 11, 11, 1, False)]


def test_the_stream_correction_leaves_nothing_stale(streams: dict[str, int]) -> None:
    """It counts each launch that it directed."""
    installed = install_stream_per_call(build_nf4_compiled(Nf4CompiledConfig()), ())
    try:
        with StreamWatch(nf4_ctypes, "launch_stream") as watch:
            for handle in (11, 12, 13):
                streams["cuda:0"] = handle
                nf4_ctypes.launch_stream(torch.device("cuda:0"))
    finally:
        installed.undo()
    assert [use.stale for use in watch.uses()] == [False] * 3
    assert installed.counters.hits == 3


def test_a_null_handle_is_the_default_stream() -> None:
    """ctypes turns 0 into None; the watch takes it for 0."""
    owner = SimpleNamespace(choose=lambda device: ctypes.c_void_p(0))
    with StreamWatch(owner, "choose", current=lambda device: 0) as watch:
        owner.choose(torch.device("cuda:0"))
    assert [use.stale for use in watch.uses()] == [False]


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
    with StreamWatch(nf4_ctypes, "launch_stream") as watch, torch.cuda.stream(torch.cuda.Stream()):
        nf4_ctypes.dequantize(weight, state)
    assert [use.stale for use in watch.uses()] == [True]
