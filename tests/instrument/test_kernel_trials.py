"""The trials of kernels find the seeded faults of a labelled corpus, and none in its healthy kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_corpus import HEALTHY, SEEDED, Made, function, rand
from torch import Tensor, nn

from dtypedoctor.instrument.live_call import LiveCall
from dtypedoctor.lab.audit.subject import Called, Subject
from dtypedoctor.lab.audit.trials import Trials
from dtypedoctor.lab.audit.verdicts import COMPILED, UNINITIALIZED, KernelTried

NOT_SEEN = {"saves_statistics_in_float16"}
"""Rounding of 5e-4 in each element, which is less than 1e-4 along a random direction, and the same whatever the dtype of the inputs."""


def tried(made: Made, holder: nn.Module | None = None, *, is_compiled: bool = False) -> KernelTried:
    kernel, args = made
    report = KernelTried(kernel="kernel", kind="")
    call = LiveCall.entered(Called(kernel, holder), "kernel", args, {})
    Trials(Subject(call, is_compiled=is_compiled), report, 60.0).run()
    return report


def test_seeded_faults_get_the_right_verdict() -> None:
    verdicts = {kernel.name: tried(kernel.make()).verdict for kernel in SEEDED}
    assert len(verdicts) >= 30
    assert {kernel.name for kernel in SEEDED if verdicts[kernel.name] != kernel.verdict} <= NOT_SEEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_kernels_pass(name: str, dtype: torch.dtype) -> None:
    report = tried(HEALTHY[name](dtype))
    assert (report.verdict, report.said) == ("", "")
    assert "twice" in report.passed


@pytest.mark.parametrize("wrong", [2, torch.tensor([2.0] * 9 + [float("nan")])])
def test_a_dtype_in_which_the_kernel_is_wrong_is_no_reference(wrong: Any) -> None:
    """LigerGroupNormFunction is called with float32 only, and in Triton's interpreter its float64 gradients are wrong."""
    kernel = function(lambda ctx, x: x * 3, lambda ctx, g: g * (wrong if g.dtype is torch.float64 else 3))
    report = tried((kernel, (rand(6, 10),)))
    assert (report.verdict, "reference" in report.passed, "direction" in report.passed) == ("", False, True)


def operator(name: str, run: Callable[..., None]) -> Callable[..., Any]:
    return torch.library.custom_op(
        f"trials::{name}", run, mutates_args=("out",), schema="(Tensor x, Tensor(a!) out) -> ()"
    )


def test_an_argument_that_an_operator_writes_to_is_one_of_its_results() -> None:
    """As vLLM's operators do, it returns nothing."""

    def run(x: Tensor, out: Tensor) -> None:
        scratch = torch.empty_like(x)
        scratch[1:] = x[1:]
        out.copy_(scratch)

    arguments = rand(6, 10, grad=False), torch.zeros(6, 10)
    assert tried((operator("unwritten_row", run), arguments)).verdict == UNINITIALIZED
    assert tried((operator("copies", lambda x, out: (out.copy_(x), None)[1]), arguments)).verdict == ""


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_buffers_that_a_call_updates_are_put_back() -> None:
    """Else the second of two calls would be another one."""
    module = Counting()
    assert tried((module, (rand(6, 10),))).verdict == ""
    assert int(module.calls) == 0


def test_a_kernel_that_calls_a_collective_is_not_tried() -> None:
    """Other ranks would wait for each repetition."""
    import torch.distributed as dist

    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report = tried((function(forward, lambda ctx, g: g), (rand(6, 10),)))
    finally:
        dist.destroy_process_group()
    assert (report.passed, report.verdict) == ([], "")
    assert "it calls the collective" in report.not_tried[0]


class Detaching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.detach().mean(0)


def scaled(factor: float) -> Callable[..., Any]:
    """A backend of torch.compile whose code returns ``factor`` times what eager mode does."""
    return lambda graph, _: lambda *args: tuple(output * factor for output in graph(*args))


@pytest.mark.parametrize(("factor", "verdict"), [(1.01, COMPILED), (1.0, "")])
def test_a_compiled_region_is_compared_with_eager_mode(factor: float, verdict: str) -> None:
    """Of code that may detach what it likes. The bias before a batch norm has a gradient of 0, of which rounding leaves something in one of the two."""
    model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4), Detaching())
    compiled = torch.compile(model.forward, backend=scaled(factor))
    assert tried((compiled, (rand(6, 10, grad=False),)), model, is_compiled=True).verdict == verdict
