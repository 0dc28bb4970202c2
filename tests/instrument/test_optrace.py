"""The op trace: where a bad value is born, and which operand was the odd one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor._torch_private import top_function_mode
from dtypedoctor.diagnosis import diagnose
from dtypedoctor.trace.events import Op, Replay


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        squares = self.lin(x).square().sum(-1)
        return squares.sqrt()


@pytest.mark.parametrize("nested", [False, True], ids=["once", "twice"])
def test_a_gradient_of_a_transformation_belongs_to_the_forward_line_that_it_differentiates(
    nested: bool, tmp_path: Path
) -> None:
    """Inside of ``torch.func.grad`` an operator has a node for each transformation, and one for the parameters' own gradients."""
    net = Root()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, parameters, (torch.zeros(2, 4),)).sum()

    def work(_: object) -> None:
        parameters = dict(net.named_parameters())
        if nested:
            torch.func.grad(lambda p: torch.func.grad(loss)(p)["lin.weight"].sum())(parameters)
        else:
            torch.func.grad(loss)(parameters)

    trace = watched(tmp_path, work, traced=True)
    born = next(op for op in trace.all(Op) if op.op == "aten.div.Tensor" and op.phase == "backward")
    line = Root.forward.__code__.co_firstlineno + 2
    assert (born.root, born.fqn) == (0, "")
    assert born.source is not None
    assert born.source.endswith(f"test_optrace.py:{line}")


class Glance(nn.Module):
    """Attention in steps behind a layer, in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ask = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        asked = self.ask(x)
        return (asked @ asked.mT).softmax(-1).to(torch.float64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_that_are_made_of_others_are_taken_apart_in_inference_mode_too(
    tmp_path: Path, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """There torch leaves them whole, and a product with a weight would not be told from one of activations."""

    def work(_: object) -> None:
        with mode():
            Glance()(torch.randn(2, 3, 4))

    trace = watched(tmp_path, work, traced=True)
    computing = [op.op for op in trace.all(Op) if op.op.split(".")[1] in ("addmm", "bmm", "_softmax", "_to_copy")]
    assert computing == ["aten.addmm.default", "aten.bmm.default", "aten._softmax.default", "aten._to_copy.default"]
    assert all(op.error is None for op in trace.all(Op))


def test_whole_numbers_that_an_op_rejects_are_cast_to_the_dtype_of_the_others(tmp_path: Path) -> None:
    """Where everything else agrees; the op's own operands stay as they are."""
    numbers = torch.arange(4).reshape(1, 4)
    trace = watched(tmp_path, lambda _: nn.Linear(4, 4)(numbers), traced=True)
    assert {(r.how, r.finite, r.note) for r in trace.all(Replay)} == {
        ("equal-dtypes", True, ""),
        ("all-as-float32", True, ""),
    }
    assert numbers.dtype is torch.int64
    finding = diagnose(trace)[0]
    assert (finding.id, finding.dtype, finding.confidence) == ("model-input-dtype", "int64", "proven")


def _with_numpy() -> None:
    nn.Linear(4, 4).bfloat16()(torch.ones(1, 4, dtype=torch.bfloat16)).detach().numpy()


def _with_a_transform() -> None:
    torch.fft.rfft(nn.Linear(4, 4).half()(torch.ones(1, 4).half()))


def _with_complex_gradients() -> None:
    found, scale = torch.zeros(1), torch.ones(1)
    gradient = torch.view_as_complex(nn.Linear(4, 2)(torch.ones(3, 4)).detach())
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, scale)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("work", "dtype", "how"),
    [
        (_with_numpy, "bfloat16", "all-as-float32"),
        (_with_a_transform, "float16", "all-as-float32"),
        (_with_complex_gradients, "complex64", "as-real"),
    ],
    ids=["numpy", "transform", "complex"],
)
def test_a_function_that_lacks_a_dtype_is_tried_in_another_wherever_it_is_called(
    tmp_path: Path, work: Callable[[], None], dtype: str, how: str
) -> None:
    """Outside of modules, and above the dispatcher, too; whatever its message says. Afterwards no mode is left."""
    trace = watched(tmp_path, lambda _: work(), traced=True)
    assert [(replay.how, replay.note) for replay in trace.all(Replay) if replay.how == how] == [(how, "")]
    finding = diagnose(trace)[0]
    assert (finding.id, finding.confidence) == ("unsupported-dtype", "proven")
    assert f"not implemented for {dtype}" in finding.summary
    assert top_function_mode() is None


def test_a_function_that_raises_in_float32_too_lacks_no_dtype(tmp_path: Path) -> None:
    """The matrix is not square, in whatever dtype."""
    trace = watched(tmp_path, lambda _: torch.linalg.inv(nn.Linear(4, 4).half()(torch.ones(1, 4).half())), traced=True)
    assert diagnose(trace) == ()
