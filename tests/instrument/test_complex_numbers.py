"""Complex tensors are measured wherever real ones are: parameters, gradients, operands and what an operator gives in a wider dtype."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument import recorders
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.operators import in_wider
from dtypedoctor.instrument.replay import note_replay, replay_wider
from dtypedoctor.instrument.statistics import extent_of
from dtypedoctor.trace.events import Coverage, Op, Replay
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.writer import TraceWriter


class Spectrum(nn.Module):
    """Weights the spectrum of a signal with a complex parameter and divides it by its magnitude, where asked."""

    def __init__(self, *, divides: bool) -> None:
        super().__init__()
        self.divides = divides
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.cfloat))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.rfft(x) * self.weight
        z = z / z.abs() if self.divides else z
        return self.last(torch.fft.irfft(z, n=8))


def trained(directory: Path, weight: Tensor, steps: int) -> Trace:
    """The trace of steps on the root of the magnitude of a complex weight, whose slope at 0 is infinite."""
    optimizer = torch.optim.SGD([weight], 0.1)

    def work(_: Instruments) -> None:
        for _ in range(steps):
            weight.abs().sqrt().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return watched(directory, work)


def coverage_of(trace: Trace) -> Coverage:
    """How much was measured."""
    found = trace.last(Coverage)
    assert found is not None
    return found


def bad_places(trace: Trace) -> set[str]:
    return {site.kind for sample, site in trace.measured() if not sample.finite}


def test_an_element_counts_once_however_many_of_its_parts_are_not_finite() -> None:
    """The magnitude is that of the largest part; NaN in either part makes the element NaN."""
    inf = float("inf")
    extent = extent_of(torch.tensor([complex(float("nan"), inf), complex(-inf, 0), complex(0, inf), complex(3, -4)]))
    assert extent is not None
    assert (extent.absmax, extent.num_nan, extent.num_posinf, extent.num_neginf) == (4.0, 1, 1, 1)


def test_conjugated_and_negated_views_are_measured_as_they_are_read() -> None:
    """The bits that torch sets in the place of computing are resolved first, and nothing enters autograd."""
    tensor = torch.tensor([complex(0, float("inf")), 2 + 5j], requires_grad=True)
    conjugated = extent_of(tensor.conj())
    assert conjugated is not None
    assert (conjugated.absmax, conjugated.num_posinf, conjugated.num_neginf) == (5.0, 0, 1)
    assert extent_of(torch._neg_view(tensor)) is not None
    assert extent_of(tensor.conj().imag) is not None


def test_what_has_no_values_to_read_is_not_measured() -> None:
    """Complex tensors without memory, and those inside of ``vmap``, are told apart from finite ones."""
    inside: list[Any] = []
    torch.func.vmap(lambda row: inside.append(extent_of(row)) or row)(torch.ones(2, 3, dtype=torch.cfloat))
    assert inside == [None]
    assert extent_of(torch.ones(2, dtype=torch.cfloat, device="meta")) is None


def test_gradients_and_values_of_complex_parameters_are_measured(tmp_path: Path) -> None:
    """All of them count, and a step that makes them NaN is seen in the gradient and in the parameter."""
    trace = trained(tmp_path, nn.Parameter(torch.zeros(4, dtype=torch.cfloat)), 1)
    coverage = coverage_of(trace)
    assert (coverage.gradients, coverage.gradients_measured) == (1, 1)
    assert bad_places(trace) >= {"grad", "param"}
    finding = diagnose(trace)[0]
    assert (finding.id, finding.phase) == ("domain-error", "backward")


def test_behind_a_stream_the_same_of_complex_parameters_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches of a GPU get real views; here they are measured on a CPU."""
    monkeypatch.setattr(recorders, "BEHIND", frozenset({"cpu"}))
    trace = trained(tmp_path, nn.Parameter(torch.zeros(4, dtype=torch.cfloat)), 1)
    coverage = coverage_of(trace)
    assert (coverage.gradients, coverage.gradients_measured) == (1, 1)
    assert bad_places(trace) >= {"grad", "param"}


def test_a_training_of_complex_parameters_that_stays_finite_is_healthy(tmp_path: Path) -> None:
    """Parameters, gradients and steps are all measured, and nothing is found."""
    trace = trained(tmp_path, nn.Parameter(torch.ones(4, dtype=torch.cfloat)), 3)
    coverage = coverage_of(trace)
    assert (coverage.gradients, coverage.gradients_measured) == (3, 3)
    assert {"initial", "grad", "param"} <= {site.kind for site in trace.sites.values()}
    assert not diagnose(trace)


def test_parameters_that_cannot_be_read_count_as_not_measured(tmp_path: Path) -> None:
    """The gradient of a parameter of a class of its own is counted, and it is not said that it was measured."""

    own = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
    plain = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([own, plain], 0.1, foreach=False)

    def work(_: Instruments) -> None:
        torch.autograd.backward([(own * 2).sum(), plain.sum()])
        optimizer.step()

    coverage = coverage_of(watched(tmp_path, work))
    assert (coverage.gradients, coverage.gradients_measured) == (2, 1)


def test_the_operator_of_a_module_that_makes_complex_nan_is_named(tmp_path: Path) -> None:
    """0/0 in a spectrum is blamed on the division and not on the inverse transform after it, by measurements of all operands."""
    signal = torch.ones(2, 8)
    signal[1] = 0
    trace = watched(tmp_path, lambda _: Spectrum(divides=True)(signal), traced=True)
    finding = diagnose(trace)[0]
    assert (finding.op, finding.confidence) == ("aten.div.Tensor", "proven")
    assert all(t.absmax is not None for op in trace.all(Op) for t in op.inputs)
    assert any("is not finite either" in line for line in finding.evidence)
    assert not any("in float64 is finite" in line for line in finding.evidence)


def replays_of(directory: Path, run: Any) -> list[Replay]:
    """What ``run`` writes of operator 1."""
    writer = TraceWriter(directory)
    run(writer)
    writer.close()
    return read_trace(directory).all(Replay)


def test_complex_operands_are_made_wider(tmp_path: Path) -> None:
    """A product beyond complex64 is finite with parts in float64; 0/0 is not finite in any dtype."""
    large, zero = torch.full((2,), 1e30 + 0j, dtype=torch.cfloat), torch.zeros(2, dtype=torch.cfloat)

    def run(writer: TraceWriter) -> None:
        replay_wider(writer, 1, torch.ops.aten.mul.Tensor, (large, large), {})
        replay_wider(writer, 1, torch.ops.aten.div.Tensor, (zero, zero), {})

    product, quotient = replays_of(tmp_path, run)
    assert (product.how, product.finite, product.dtype, product.note) == ("float64", True, "complex128", "")
    assert (quotient.how, quotient.finite, quotient.note) == ("float64", False, "")


def test_a_result_that_cannot_be_measured_is_not_said_to_be_finite(tmp_path: Path) -> None:
    """Neither is a result without memory; whether an operator with equal dtypes raises needs no values."""
    unread = [torch.ones(2, dtype=torch.cfloat, device="meta")]

    def run(writer: TraceWriter) -> None:
        note_replay(writer, 1, "float64", unread)
        note_replay(writer, 1, "equal-dtypes", unread)

    wider, equal = replays_of(tmp_path, run)
    assert (wider.finite, bool(wider.note)) == (False, True)
    assert (equal.finite, equal.note) == (True, "")


@pytest.mark.parametrize(
    "func", [torch.ops.aten.abs.default, torch.ops.aten.angle.default, torch.ops.aten.view_as_real.default]
)
def test_real_numbers_of_complex_ones_are_made_of_both_parts_in_a_wider_dtype(
    func: Any, recwarn: pytest.WarningsRecorder
) -> None:
    spectrum = torch.fft.rfft(torch.linspace(-1, 2, 32))

    (exact,) = in_wider(func, ((spectrum,), {}), torch.float64, (torch.float32,), {})

    assert exact.dtype is torch.float64
    torch.testing.assert_close(exact, func(spectrum).double(), rtol=1e-4, atol=1e-4)
    assert not recwarn.list


class InWider(TorchDispatchMode):
    """Computes each operator in float64 as well, inside of the program's call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_wider(func, (args, kwargs or {}), torch.float64, (torch.float32,), {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "warns", [lambda x: torch.complex(x, x).to(torch.float32), lambda x: x[:1].std(0)], ids=["once", "each-time"]
)
def test_an_operator_in_a_wider_dtype_warns_nobody(warns: Callable[[Tensor], Tensor]) -> None:
    """Nor takes away what torch warns of once in a process: the program hears of its own call, once."""
    x, filters = torch.linspace(-1, 2, 32), warnings.filters

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with InWider():
            warns(x)

    assert len(heard) == 1
    assert warnings.filters is filters
