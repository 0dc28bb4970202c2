"""What an operator's operands would be in float32: told from what rounding has made of them."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.trace.events import NotWatched

ZEROS = torch.zeros(2, 4, dtype=torch.float16)


class Apply(nn.Module):
    """A module that does one thing."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def findings(folder: Path, work: Callable[[], Any]) -> tuple[Finding, ...]:
    """What is found in the first call of ``work`` under the op trace."""
    trace = watched(folder, lambda _: work(), traced=True)
    assert not trace.all(NotWatched)
    return diagnose(trace)


def normalised(x: Tensor) -> Tensor:
    """A norm that squares in its own dtype, and another one that divides by what the first returns."""
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x / (x.var(-1, keepdim=True) + 1e-12), "1e-12"),
        (lambda x: (x - x.mean()) / (x.std() + 1e-8), "1e-08"),
        (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12), "1e-12"),
        (lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12), "1e-12"),
        (lambda x: nn.functional.normalize(x, dim=-1), "1e-12"),
        (lambda x: x / (x.sum() + torch.full((), 1e-12, dtype=x.dtype)), "1e-12"),
        (lambda x: x / (x.sum() + torch.tensor(1e-12, dtype=x.dtype)), "number 1e-12"),
        (lambda x: torch.log(torch.softmax(x + torch.tensor([0, -30, 0, 0], dtype=x.dtype), -1)), "_softmax"),
        (lambda x: torch.log(1 - (1 - (x + 1e-4).bfloat16())), "rsub"),
    ],
    ids=["variance", "deviation", "root", "clamp", "expanded", "full", "tensor", "logarithm", "difference"],
)
def test_a_number_that_rounds_to_zero_is_no_domain_error(
    function: Callable[[Tensor], Tensor], words: str, tmp_path: Path
) -> None:
    """An epsilon added, clamped to or made a tensor of, a probability, a difference: in float32 the same program is finite."""
    (found,) = findings(tmp_path, lambda: Apply(function)(ZEROS))
    assert (found.id, found.confidence) == ("rounds-out-of-domain", "proven")
    assert words in found.summary


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.guard = nn.Parameter(torch.tensor(1e-10))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.sum() + self.guard)


def cast() -> nn.Module:
    """The model is cast after it was made."""
    return Guarded().half()


def loaded() -> nn.Module:
    model = Guarded().half()
    model.guard.data.fill_(1.0)
    model.load_state_dict(Guarded().state_dict())
    return model


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("make", [cast, loaded])
def test_a_parameter_that_a_cast_has_rounded_to_zero_is_named(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """What the cast lost is known from the float32 value, also where the cast was long before."""
    found = findings(tmp_path, lambda: make()(ZEROS))[0]
    assert (found.id, found.confidence) == ("rounds-out-of-domain", "proven")
    assert "The parameter guard rounds to 0 in float16" in found.summary


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("function", [lambda x: x / x.sum(), lambda x: torch.log(x - 1)], ids=["0/0", "log"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_domain_error_is_one_that_the_float32_program_has_too(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    """A division by what is 0 in exact arithmetic, and the logarithm of a negative number."""
    (found,) = findings(tmp_path, lambda: Apply(lambda x: function(x.to(dtype)))(torch.zeros(2, 4)))
    assert (found.id, found.confidence) == ("domain-error", "proven")


def one_pass(x: Tensor) -> Tensor:
    """A deviation whose two means are equal up to float32's rounding."""
    return (x.pow(2).mean(-1) - x.mean(-1).pow(2)).sqrt()


def exact_one_pass(x: Tensor) -> Tensor:
    return (x.double().pow(2).mean(-1) - x.double().mean(-1).pow(2)).sqrt()


@pytest.mark.parametrize("inside", [True, False], ids=["in a module", "outside"])
def test_a_difference_that_float32_rounds_below_zero_is_no_domain_error(inside: bool, tmp_path: Path) -> None:
    """In float64, from the data on, the same program is finite: the finding names what rounds."""
    x = 1000 + 0.01 * torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    assert one_pass(x).isnan().any()
    assert exact_one_pass(x).isfinite().all()
    if inside:
        (found,) = findings(tmp_path, lambda: Apply(one_pass)(x))
    else:
        (found,) = diagnose(watched(tmp_path, lambda _: one_pass(x).sum().item()))
    assert (found.id, found.confidence) == ("rounds-out-of-domain", "proven")
    assert "The result of aten.pow.Tensor_Scalar rounds in float32" in found.summary
    assert found.proven_by is not None
    assert "in float64 is finite" in found.proven_by


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:0].mean(),
        lambda x: x[:1, :1].var(-1),
        lambda x: nn.functional.cross_entropy(x.float(), torch.full((2,), -100)),
        lambda x: x / 0,
    ],
    ids=["mean of nothing", "variance of one", "labels ignored", "number"],
)
def test_an_error_that_no_values_help_is_none_of_the_domain(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    """With other numbers in the place of its operands the operator fails as well; with values in its domain `log` does not."""
    x = torch.ones(2, 4, dtype=dtype)
    (found,) = diagnose(watched(tmp_path, lambda _: function(x).sum().item()))
    assert (found.id, found.confidence) == ("domain-error", "proven")
    assert "whatever numbers it gets" in found.cause
    assert found.proven_by is not None
    assert "other numbers" in found.proven_by


def test_a_domain_error_of_what_was_rounded_before_the_op_trace_is_not_proven(tmp_path: Path) -> None:
    """1e-9 became 0 in an earlier call, in a tensor too large for its original to be kept."""
    rounded = torch.full((8192,), 1e-9).half()
    (found,) = findings(tmp_path, lambda: Apply(torch.log)(rounded * 1.0))
    assert (found.id, found.confidence) == ("domain-error", "likely")
    assert "Whether float32 helps is not known" in found.cause


def shifted_apart(x: Tensor) -> Tensor:
    """The overlap of boxes over their area, after an offset in which their size is lost."""
    boxes = (x[:2] * 0.05 + torch.tensor([0.0, 0.02, 0.03, 0.06], dtype=x.dtype)) + 1000.0
    area = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
    return area / area.sum()


def noised(x: Tensor) -> Tensor:
    """A schedule whose first entry half precision makes 1, which goes into both terms of what is divided by."""
    kept = (1 - torch.tensor([1e-4, 0.02])).to(x.dtype)
    sigma = (1 - kept) / kept
    step = ((x.float() + 1) * 2 - 1) * 0.5
    return (step - (step - sigma[0] * step)) / sigma[0]


def written_in_place(x: Tensor) -> Tensor:
    rows = (x * 0).clone()
    rows.add_(1e-8)
    return torch.log(rows[0])


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.log(1 - (x + 1) + 1e-8), "The number 1e-08 rounds to 0 in float16"),
        (lambda x: torch.log(1 - (x + 1).clamp(max=1 - 1e-6)), "The number 0.999999 rounds to 1 in float16"),
        (lambda x: torch.log(1 - (x - 1e-4).exp()), "The result of aten.exp.default rounds to 1 in float16"),
        (lambda x: 1 / ((x + 1e-5) ** 2).float(), "The result of aten.pow.Tensor_Scalar rounds to 0 in float16"),
        (written_in_place, "The number 1e-08 rounds to 0 in float16"),
        (shifted_apart, "The result of aten.add.Tensor rounds in float16 at "),
        (noised, "The result of aten._to_copy.default rounds to 1 in float16"),
    ],
    ids=["epsilon", "bound", "exponential", "cast back", "in place", "boxes", "schedule"],
)
def test_what_rounds_before_an_operator_outside_of_modules_is_found(
    function: Callable[[Tensor], Tensor], words: str, tmp_path: Path
) -> None:
    """The operator is not finite in float32 on what it was given, and is on what it would have been given."""
    (found,) = diagnose(watched(tmp_path, lambda _: function(ZEROS.float().half()).sum().item()))
    assert (found.id, found.confidence) == ("rounds-out-of-domain", "proven")
    assert words in found.summary


def test_the_operator_that_fails_has_its_own_line_beside_that_of_what_rounds(tmp_path: Path) -> None:
    """Outside of modules both are at lines of the program, which need not be one."""

    def work(_: object) -> None:
        guarded = ZEROS.half() + 1e-8
        quotients = ZEROS.half() / guarded
        quotients.sum().item()

    (found,) = diagnose(watched(tmp_path, work))
    rounds, fails = re.findall(r"test_float32_program\.py:(\d+)", found.summary)
    assert (found.id, int(fails)) == ("rounds-out-of-domain", int(rounds) + 1)


def test_a_number_of_the_code_that_its_tensor_rounds_is_behind_a_division_by_zero(tmp_path: Path) -> None:
    """1 - 0.999 is 0 in bfloat16 and finite in float32: the tensor is made of the number, in the line that is named."""

    def program(_: object) -> None:
        decay = torch.tensor(0.999, dtype=torch.bfloat16)
        average = torch.zeros(4, dtype=torch.bfloat16)
        (average / (1 - decay)).sum().item()

    found = diagnose(watched(tmp_path, program))[0]
    assert (found.id, found.confidence) == ("rounds-out-of-domain", "proven")
    assert "The number 0.999 rounds to 1 in bfloat16" in found.summary


def test_a_number_that_its_tensor_rounds_to_0_is_behind_a_division_by_zero(tmp_path: Path) -> None:
    """An epsilon in a tensor of its own, and in the same expression."""

    def program(_: object) -> None:
        guarded = ZEROS.half() + torch.tensor(1e-8, dtype=torch.float16)
        (ZEROS.half() / guarded).sum().item()

    (found,) = diagnose(watched(tmp_path, program))
    assert (found.id, found.confidence) == ("rounds-out-of-domain", "proven")
    assert "The number 1e-08 rounds to 0 in float16" in found.summary


def test_the_rounding_error_of_a_sum_in_float32_is_no_other_value(tmp_path: Path) -> None:
    """The deviation of equal numbers is 0, although float32 may not sum them up to that."""
    equal = torch.full((7,), 0.1).half()
    (found,) = diagnose(
        watched(tmp_path, lambda _: ((equal - equal.mean()) / (equal - equal.mean()).abs().sum()).sum().item())
    )
    assert (found.id, found.confidence) == ("domain-error", "likely")


def test_an_overflow_that_made_a_norm_return_zeros_stands_behind_the_division_by_them(tmp_path: Path) -> None:
    """The square of 300 is the root; 0/0 in the next norm is its consequence."""
    found = findings(tmp_path, lambda: Apply(normalised)(torch.full((2, 4), 300.0).half()))[0]
    assert (found.id, found.op, found.confidence) == ("norm-square-overflow", "aten.pow.Tensor_Scalar", "proven")


class Scaled(Tensor):
    """Numbers as int8 and a scale, as libraries for 8-bit training keep them; every operator dequantizes."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, x: Tensor) -> "Scaled":
        """``x`` in 8 bits."""
        scale = x.abs().amax() / 127
        return cls((x / scale).round().clamp(-127, 127).to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> "Scaled":
        return Scaled(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def dense(value: Any) -> Any:
            return value.codes.to(value.scale.dtype) * value.scale if isinstance(value, Scaled) else value

        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))


class Eighth(nn.Module):
    """A linear layer in 8 bits that quantizes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        scale = 127 / x.abs().amax()
        return torch.mm((x * scale).round() / scale, Scaled.of(self.weight.detach()))


def test_what_a_tensor_of_a_class_of_its_own_computes_is_followed_to_the_input(tmp_path: Path) -> None:
    """One inf in the input of two layers makes NaN inside of the class, which is nobody's fault but the input's."""
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    x[0, 1] = float("inf")
    found = findings(tmp_path, lambda: nn.Sequential(Eighth(), Eighth())(x))[0]
    assert found.id == "nonfinite-input"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone: DTensor does what it does among many."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Squared(nn.Module):
    """Two linear layers around a square."""

    def __init__(self, up: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        nn.init.constant_(self.up.weight, up)
        nn.init.constant_(self.down.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h * h).float()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("up", "op", "fqn"), [(40.0, "aten.mul.Tensor", ""), (10.0, "aten.mm.default", "down")])
def test_an_overflow_in_a_tensor_parallel_block_is_proven_on_the_local_tensors(
    up: float, op: str, fqn: str, one_rank: Any, tmp_path: Path
) -> None:
    """Not a domain error of the cast that first shows a plain tensor."""

    def work() -> Tensor:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        result: Tensor = parallelize_module(Squared(up).half(), one_rank, plan)(torch.ones(2, 8).half())
        return result

    (found,) = findings(tmp_path, work)
    assert (found.id, found.op, found.fqn, found.confidence) == ("float16-overflow", op, fqn, "proven")
