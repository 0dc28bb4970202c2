"""The modes that see operators: the compiler is not loaded for them, and never compiles them."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from torch import Tensor, nn
from watched import watched

from dtypedoctor.instrument import operators
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.operators import OperatorMode, for_wider, is_whole, tensors_of

LOOKED_AT = """
    import sys, torch
    from pathlib import Path
    from watched import op_trace
    from dtypedoctor.instrument.operators import keep_compiler_out
    from dtypedoctor.instrument.instruments import Instruments
    from dtypedoctor.trace.events import Op
    from dtypedoctor.trace.reader import read_trace
    from dtypedoctor.trace.writer import TraceWriter
    from dtypedoctor.worker.on_import import after_import
    writer = TraceWriter(Path(sys.argv[1]))
    instruments = Instruments(writer)
    after_import("torch._dynamo", keep_compiler_out)
    instruments.start()
    opened = op_trace(instruments)
    opened.__enter__()
"""
"""The routine look and the op trace are both open in the first two calls."""

COMPILES = """
    net = torch.nn.Linear(4, 4)
    net(torch.ones(2, 4))
    assert "torch._dynamo" not in sys.modules
    class Late(torch.nn.Module):
        def forward(self, x):
            return torch.compile(lambda y: net(y).relu() + 1, backend="eager")(x)
    Late()(torch.ones(2, 4)).sum().backward()
    counters = torch._dynamo.utils.counters
    instruments.stop()
    writer.close()
    print(len(read_trace(Path(sys.argv[1])).all(Op)) > 0, counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
"""


@pytest.mark.slow
def test_the_compiler_is_loaded_by_the_program_alone_and_compiles_nothing_of_the_doctors(tmp_path: Path) -> None:
    """Also where it comes while a mode is open: torch runs the call uncompiled then, and no function of the watch is compiled for it."""
    source = textwrap.dedent(LOOKED_AT) + textwrap.dedent(COMPILES)
    done = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, check=False, timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )  # fmt: skip
    assert done.stdout == "True 0 {}\n", done.stderr


def scales_list(held: list[Tensor]) -> None:
    """Writes to a tensor by an operator on lists, as clipping and optimizers do on a GPU."""
    with torch.no_grad():
        torch._foreach_mul_(held, 2.0)


class Scales(nn.Module):
    """Does so in its call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        scales_list([self.kept])
        return x + self.kept


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "where", ["between modules", "in a module that is looked at", "under the op trace", "in an optimizer"]
)
def test_writes_by_operators_on_lists_count_as_without_a_mode(where: str, tmp_path: Path) -> None:
    """torch counts them by the operators on single tensors, which no mode lets it run; autograd would accept what it has to refuse."""
    held, module = torch.ones(3), Scales()

    def between() -> None:
        scales_list([held])

    def inside() -> None:
        module(torch.ones(3))

    def stepping() -> None:
        parameter = nn.Parameter(held)
        parameter.grad = torch.ones(3)
        torch.optim.SGD([parameter], foreach=True).step()
        assert parameter._version == 1

    works: dict[str, Callable[[], None]] = {"between modules": between, "in an optimizer": stepping}

    watched(tmp_path, lambda _: works.get(where, inside)(), traced=where == "under the op trace")
    assert (module.kept if where not in works else held)._version == 1


def test_autograd_refuses_a_saved_tensor_that_an_operator_on_lists_has_written_to(tmp_path: Path) -> None:
    """As it does in the bare program."""

    def work(_: Instruments) -> None:
        x = torch.ones(3, requires_grad=True)
        saved = x.exp()
        scales_list([saved])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()

    watched(tmp_path, work)


def test_an_operator_on_lists_is_made_again_on_copies(tmp_path: Path) -> None:
    """Of mixed dtypes too: what the op trace tries in float32 writes nothing into float32 memory of the program."""
    masters, halves = [torch.ones(3)], [torch.full((3,), 0.5, dtype=torch.float16)]

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._foreach_add_(masters, halves)
            torch._foreach_addcmul_(masters, halves, [halves[0].float()], 2.0)
            return x + masters[0]

    with torch.no_grad():
        watched(tmp_path, lambda _: Adds()(torch.ones(3)), traced=True)
    assert masters[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_a_softmax_that_casts_by_itself_is_made_again_without_the_cast(name: str) -> None:
    """On a GPU it takes half precision and returns float32; of float32 operands torch accepts it without that only."""
    func = getattr(torch.ops.aten, name).default
    half: Any = (torch.ones(2, dtype=torch.float16), -1, True), {}
    wide: Any = (torch.ones(2), -1, True), {}
    assert for_wider(func, half) is half
    assert for_wider(func, wide)[0][1:] == (-1, False)
    assert func(*for_wider(func, wide)[0]).dtype is torch.float32


class Through(OperatorMode):
    """Sees every operator, as the look and the sentinel do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_whole(func, types, tensors_of((args, kwargs))):
            return self.taken_apart(func, args, kwargs)
        return self.run(func, args, kwargs)


SQUARE = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
CALLING = {
    "a fused encoder": lambda: ENCODER(SQUARE),
    "a bilinear form": lambda: nn.functional.bilinear(SQUARE, SQUARE, SQUARE),
    "a pseudo-inverse": lambda: torch.linalg.pinv(SQUARE),
    "a pseudo-inverse of complex numbers": lambda: torch.linalg.pinv(torch.complex(SQUARE, SQUARE.flip(0))),
    "a sum of products": lambda: torch.einsum("bij,bjk->bik", SQUARE, SQUARE),
    "a covariance": lambda: torch.cov(SQUARE[0]),
    "attention": lambda: nn.functional.scaled_dot_product_attention(SQUARE[None], SQUARE[None], SQUARE[None], SQUARE),
    "attention in steps": lambda: torch._scaled_dot_product_attention_math(SQUARE, SQUARE, SQUARE)[0],
    "an inverse transform": lambda: torch.fft.hfftn(torch.complex(SQUARE, SQUARE.flip(0))),
    "an interpolation": lambda: nn.functional.interpolate(SQUARE[None], scale_factor=1.7, mode="bicubic"),
    "an operator of the program": lambda: own_product(SQUARE),
}
"""Calls of operators that call others: by a kernel, or by what they are made of."""


@torch.library.custom_op("dtypedoctor_tests::own_product", mutates_args=())
def own_product(x: torch.Tensor) -> torch.Tensor:
    """Leaves its cast to autocast."""
    return (x @ x).float()


@pytest.mark.parametrize("what", CALLING)
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "plain"])
def test_an_operator_that_calls_others_computes_the_same_bits_in_a_mode(
    what: str, without_gradients: Any, autocast: bool
) -> None:
    """Autocast casts for the operators that it calls, and conjugates that were put off are computed, as without the mode."""
    import_module("torch._decomp")  # it gives some operators another way to be taken apart

    with without_gradients(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        bare = CALLING[what]()
        with Through():
            seen = CALLING[what]()
    assert seen.dtype == bare.dtype
    assert torch.equal(seen, bare)


def test_a_model_is_exported_under_a_mode() -> None:
    """What is traced asks for devices by an operator that the dispatcher does not know."""
    with Through():
        exported = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    assert "aten.linear.default" in exported.graph_module.code


def test_what_autocast_has_cast_for_is_left_alone_inside() -> None:
    """Attention in steps has its softmax in half precision, and autocast would make it float32: on a GPU it would for any that the program calls."""
    softmax = torch.ops.aten._safe_softmax.default
    seen: list[Any] = []

    class Asking(Through):
        def run(self, func: Any, args: Any, kwargs: Any) -> Any:
            seen.append(func)
            return super().run(func, args, kwargs)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), Asking():
        nn.functional.scaled_dot_product_attention(SQUARE, SQUARE, SQUARE, SQUARE.bool(), dropout_p=0.5)
    assert softmax in seen
    keys = operators._keys_of_direct_call(softmax)
    assert not keys.has(torch._C.DispatchKey.AutocastCUDA)
    assert operators._keys_of_direct_call(torch.ops.aten._trilinear.default).has(torch._C.DispatchKey.AutocastCPU)
    assert not operators._keys_of_direct_call(torch.ops.aten._trilinear.default).has(torch._C.DispatchKey.AutocastCUDA)
