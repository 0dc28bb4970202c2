"""The trials of one kernel. Each makes its call again with one thing changed, and compares by a bound that follows from the dtype."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtypedoctor.interruptions import contained
from dtypedoctor.lab.audit import verdicts
from dtypedoctor.lab.audit.subject import Result, Subject
from dtypedoctor.unpatched import perf_counter

STEPS = tuple(2.0**-power for power in (9, 11, 13, 5, 7, 15, 17))
"""Of difference quotients, relative to the size of the input's elements; the first three are enough for a smooth forward in float64."""
DIRECTIONS = 3
EXACT = 1e-4
"""Relative error of a directional derivative that a hand-written backward may have, where the quotient is known better than that."""
OF_ROUNDING = 0.02
"""Relative error of a gradient below which what was saved is rounded, and the formula is right."""
AMPLIFIED = 8.0
"""So many times more than a rounding of its inputs changes a result may it be off."""
ZEROS = 0.05
"""Share of elements that are 0 although the dtype can hold them, from which on they underflow."""


class FaultError(Exception):
    """A trial shows a fault: one of the verdicts, and the counterfactual in words."""


class NoTrialError(Exception):
    """A trial cannot be made, for a reason that the report gives; without one there is nothing to try."""


@dataclass(slots=True)
class Trials:
    """Makes the trials of a kernel, the first that shows a fault being the last.

    Args:
        subject: the call.
        report: of the kernel, where the verdict, what was passed and what could not be tried are entered.
        seconds: for all trials together.
    """

    subject: Subject
    report: verdicts.KernelTried
    seconds: float
    _until: float = 0.0
    _made: Result = field(default_factory=lambda: Result(outputs={}, gradients={}, drew=False))
    _wide: Result | None = None
    _wide_dtype: torch.dtype | None = None

    def run(self) -> None:
        """Makes them, those first whose fault would show as another in a later one."""
        began = perf_counter()
        self._until = began + self.seconds
        compiled = (self._twice, self._eager)  # its code may detach what it likes, so no direction
        others = (self._twice, self._surroundings, self._reference, self._strides, self._direction, self._halves)
        for trial in compiled if self.subject.is_compiled else others:
            if not self._pass(trial):
                break
        self.report.seconds = round(perf_counter() - began, 2)

    def _pass(self, trial: Callable[[], None]) -> bool:
        """Whether others are to follow this trial."""
        name, report = trial.__name__.strip("_"), self.report
        with contained() as attempt:  # the errors are the kernel's own, whatever they are
            trial()
        error = attempt.error
        if isinstance(error, FaultError):
            report.verdict, report.said = error.args
            return False
        if error is None:
            report.passed.append(name)
        elif isinstance(error, NoTrialError):
            report.not_tried += [f"{name}: {error}"] if str(error) else []
        else:
            report.not_tried.append(f"{name}: {type(error).__name__}: {str(error)[:120]}")
        return trial != self._twice or error is None  # else the call itself cannot be made again

    def _again(self, **changed: object) -> Result:
        if perf_counter() > self._until:
            raise NoTrialError(f"{self.seconds:.0f} s are over")
        return self.subject.again(**changed)  # type: ignore[arg-type]

    def _twice(self) -> None:
        """The same call again: same arguments, same random generators, same surroundings."""
        zeros = {} if self.subject.is_compiled else {"padding": 0.0, "allocated": 0.0}
        self._made, again = self._again(**zeros), self._again(**zeros)
        difference = _difference(again, self._made)
        if difference and zeros:  # code in C++ and in operators allocates where only NaN can be filled in
            filled = self._again(padding=0.0, allocated=math.nan), self._again(padding=0.0, allocated=math.nan)
            if not _difference(*filled):
                said = f"two calls with the same arguments differ in {difference}, and in none if `empty` holds NaN"
                raise FaultError(verdicts.UNINITIALIZED, said)
        if difference:
            said = f"two calls with the same arguments and generators differ in {difference}"
            raise FaultError(verdicts.RACE, said)

    def _surroundings(self) -> None:
        """What is allocated, and what stands around the inputs: NaN in the place of 0."""
        for what, allocated, padding in (
            ("what `empty` allocates", math.nan, 0.0),
            ("the memory around its inputs", 0.0, math.nan),
        ):
            if difference := _difference(self._again(padding=padding, allocated=allocated), self._made):
                raise FaultError(verdicts.UNINITIALIZED, f"with NaN in the place of 0 in {what}, {difference} change")

    def _strides(self) -> None:
        """The upstream gradient with other strides, and inputs that are not contiguous as contiguous ones."""
        made = self._made
        if made.gradients:
            weights = {i: weight.to(made.outputs[i]) for i, weight in self.subject.upstream({}).items()}
            ones = {i: torch.ones_like(weight) for i, weight in weights.items()}
            expanded = {i: one.new_ones(()).expand(one.shape) for i, one in ones.items()}
            transposed = {i: w.mT.contiguous().mT if w.dim() > 1 else w for i, w in weights.items()}
            contiguous = self._again(upstream=ones)
            self._require_equal(
                self._again(upstream=expanded), contiguous, "the upstream gradient is expanded (strides 0)"
            )
            self._require_equal(self._again(upstream=transposed), made, "the upstream gradient is transposed")
        tensors = self.subject.tensors.items()
        others = {name: tensor.detach().contiguous() for name, tensor in tensors if not tensor.is_contiguous()}
        if others:
            self._require_equal(made, self._again(values=others), f"{', '.join(others)} is not contiguous")

    def _require_equal(self, ours: Result, contiguous: Result, when: str) -> None:
        for name, error in _errors(ours, contiguous).items():
            if error > self._bound:
                said = f"where {when}, {name} is off by {error:.2g} of its size from the call with contiguous tensors"
                raise FaultError(verdicts.STRIDES, said)

    def _halves(self) -> None:
        """The rows of one half of the batch by themselves, where other rows have no part in their result."""
        rows = self._rows()
        tensors = self.subject.tensors.items()
        batched = {name: tensor.detach() for name, tensor in tensors if tensor.dim() and tensor.shape[0] == rows}
        outputs = {i: tensor for i, tensor in self._made.outputs.items() if tensor.dim() and tensor.shape[0] == rows}
        halves = slice(0, rows // 2), slice(rows // 2, rows)
        for changed, same in (halves, halves[::-1]):
            values = {name: tensor.clone() for name, tensor in batched.items() if tensor.is_floating_point()}
            for value in values.values():
                value[changed] = 0.5 * value[changed] + 0.25
            others = self._again(values=values, backward=False)
            if any(_error(others.outputs[i][same], tensor[same]) > 0 for i, tensor in outputs.items()):
                raise NoTrialError  # each row's result is one of others too, as in a batch norm
        for half in halves:
            part = self._again(values={name: tensor[half].clone() for name, tensor in batched.items()}, backward=False)
            for index, tensor in outputs.items():
                if (error := _error(part.outputs[index], tensor[half])) > self._bound:
                    said = (
                        f"rows {half.start} to {half.stop - 1} of output {index} are off by {error:.2g} of their size"
                    )
                    raise FaultError(verdicts.BATCH, f"{said} from the same rows without the others")

    def _rows(self) -> int:
        """The size of the batch, where it can be told: the first size of an output, and of nothing else."""
        outputs = list(self._made.outputs.values())
        rows = next((tensor.shape[0] for tensor in outputs if tensor.dim() > 1), 0)
        others = {size for tensor in (*self.subject.tensors.values(), *outputs) for size in tensor.shape[1:]}
        if rows < 4 or rows in others or self._made.drew:
            raise NoTrialError
        return rows

    def _eager(self) -> None:
        """A compiled region without the compiler."""
        with torch.compiler.set_stance("force_eager"):
            eager = self._again()
        self._compare(eager, verdicts.COMPILED, verdicts.COMPILED, "in eager mode")
        if self.subject.consumed and not eager.gradients:
            raise NoTrialError("outputs are equal, but what gets a gradient is not among its arguments; pass it")

    def _reference(self) -> None:
        """The same call in a wider dtype."""
        wider = [dtype for dtype in (torch.float64, torch.float32) if torch.finfo(dtype).eps < self._eps]
        for dtype in wider:
            with contained() as attempt:
                wide = self._again(dtype=dtype)
            if attempt.error is None and not _loses(wide, self._made):
                self._wide, self._wide_dtype = wide, dtype
                break
        if self._wide is None:
            raise NoTrialError(f"it takes no dtype wider than {self.subject.narrowest()}".replace("torch.", ""))
        try:
            self._compare(
                self._wide, verdicts.RANGE, verdicts.ROUNDING, f"with {self._wide_dtype} inputs".replace("torch.", "")
            )
        except FaultError:
            self._drop_wrong_reference()
            raise

    def _drop_wrong_reference(self) -> None:
        """Drops a reference whose gradient is not that of its own forward, where the kernel's own is: it may never be called in that dtype."""
        wide, dtype = self._wide, self._wide_dtype
        try:
            self._direction()
        except FaultError as fault:
            self._wide = self._wide_dtype = None
            with contained() as attempt:
                self._direction()
            if attempt.error is None:
                raise NoTrialError(f"with {dtype} inputs, {fault.args[1]}".replace("torch.", "")) from None
            self._wide, self._wide_dtype = wide, dtype

    def _compare(self, other: Result, of_range: str, of_rounding: str, how: str) -> None:
        """Raises a fault where a tensor of the first call is farther from that of another way than rounding explains.

        The bound is the larger of a few spacings of the dtype, and of what the other way itself changes by if its inputs are rounded.
        """
        if self._made.drew and any(error > 0.1 for error in _errors(self._made, other).values()):
            raise NoTrialError(f"it draws other random numbers {how}; set dropout to 0")
        self._require_in_range(other, of_range, how)
        errors = _errors(self._made, other)
        if max(errors.values(), default=0.0) <= self._bound:
            return
        generator = torch.Generator().manual_seed(1)
        rounded = {
            name: tensor.detach().double()
            * (1 + self._eps * torch.randn(tensor.shape, generator=generator).to(tensor.device))
            for name, tensor in self.subject.tensors.items()
            if tensor.is_floating_point()
        }
        if self._wide_dtype is None:
            rounded = {name: value.to(self.subject.tensors[name].dtype) for name, value in rounded.items()}
        with torch.compiler.set_stance("force_eager") if self.subject.is_compiled else nullcontext():
            moved = _errors(self._again(values=rounded, dtype=self._wide_dtype), other)
        for name in sorted(errors, key=lambda name: -errors[name]):
            allowed = max(self._bound, AMPLIFIED * moved.get(name, 0.0))
            if errors[name] > allowed:
                said = f"{name} is off by {errors[name]:.2g} of its size from the same call {how}"
                raise FaultError(of_rounding, f"{said}; rounding explains {allowed:.2g}")

    def _require_in_range(self, other: Result, verdict: str, how: str) -> None:
        largest_gradient = max((_norm(gradient) for gradient in other.gradients.values()), default=0.0)
        for name, ours in self._made.named().items():
            exact = other.named()[name]
            dtype = str(ours.dtype).removeprefix("torch.")
            bad = ~ours.isfinite() & exact.isfinite()
            if bool(bad.any()):
                largest = float(exact[exact.isfinite()].abs().max())
                said = f"{int(bad.sum()):,} of {ours.numel():,} elements of {name} are not finite in {dtype}"
                raise FaultError(verdict, f"{said}; {how} they are, the largest is {largest:.3g}")
            # What is that small beside the other gradients is what rounding leaves of a sum that is 0
            left_over = self._eps * (largest_gradient if name.startswith("gradient") else 0.0)
            held = exact.abs() >= max(torch.finfo(ours.dtype).smallest_normal, left_over)
            lost, total = int((held & (ours == 0)).sum()), int(held.sum())
            if lost > ZEROS * total:
                raise FaultError(verdict, f"{lost:,} of {total:,} elements of {name} are 0 in {dtype} and not {how}")

    def _direction(self) -> None:
        """The gradient along random directions against the difference quotient of the forward."""
        result = self._wide or self._made
        if not result.gradients:
            raise NoTrialError
        inputs = [tensor.to(self._wide_dtype or tensor.dtype) for tensor in self.subject.tensors.values()]
        if all(any(torch.equal(output, tensor) for tensor in inputs) for output in result.outputs.values()):
            raise NoTrialError(
                "it returns its inputs, and only its backward does something"
            )  # a gradient reversal, say
        undecided = []
        for name, gradient in result.gradients.items():
            ratios = list(self._ratios(name, gradient))
            wrong = [error for _, error in ratios if error > 0]
            if len(wrong) >= 2:
                verdict = verdicts.ROUNDING if max(wrong) < OF_ROUNDING else verdicts.GRADIENT
                numbers = ", ".join(f"{ratio:.4g}" for ratio, _ in ratios)
                said = f"gradient over difference quotient of its own forward along {len(ratios)} random directions"
                raise FaultError(verdict, f"{said} of {name}: {numbers}")
            undecided += [] if ratios else [name]
        if len(undecided) == len(result.gradients):
            raise NoTrialError(f"no difference quotient of its forward converges in {', '.join(undecided)}")

    def _ratios(self, name: str, gradient: Tensor) -> Iterator[tuple[float, float]]:
        """Along each direction the ratio of gradient and quotient, and the error where the quotient is known better than that.

        One direction is enough where they agree.
        """
        generator = torch.Generator().manual_seed(2)
        value = self.subject.moving[name].detach().to(gradient.dtype)
        finite = value[value.isfinite()].double()
        size = float(finite.square().mean().sqrt()) or 1.0 if finite.numel() else 1.0
        for _ in range(DIRECTIONS):
            direction = size * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
            direction = torch.where(value.isfinite(), direction, 0.0)
            analytic = float((gradient.double() * direction).sum())
            quotient, spread = self._quotient(name, value, direction)
            scale = max(abs(analytic), abs(quotient), 0.3 * float(gradient.double().norm()) * size)
            is_flat = quotient == 0 and spread == 0  # a rounding: its gradient is somebody's choice
            if not math.isfinite(quotient + analytic) or scale == 0 or is_flat or spread > 0.1 * scale:
                continue
            error = abs(analytic - quotient) / scale
            wrong = error > EXACT + 8 * spread / scale
            yield analytic / quotient if quotient else math.inf, error if wrong else 0.0
            if not wrong:
                return

    def _quotient(self, name: str, value: Tensor, direction: Tensor) -> tuple[float, float]:
        """The difference quotient of the weighed outputs at the three steps where it depends least on them, and how much it still does."""
        quotients: dict[float, float] = {}
        best = (math.nan, math.inf)
        for step in STEPS:
            sides = []
            for sign in (1, -1):
                moved = {name: (value.double() + sign * step * direction).to(value.dtype)}
                made = self._again(values=moved, dtype=self._wide_dtype, backward=False)
                sides.append(self.subject.weighed(made.outputs))
            quotients[step] = (sides[0] - sides[1]) / (2 * step)
            ordered = [quotients[key] for key in sorted(quotients)]
            for three in zip(ordered, ordered[1:], ordered[2:], strict=False):
                if max(three) - min(three) < best[1]:
                    best = (sorted(three)[1], max(three) - min(three))
            if best[1] <= 1e-5 * abs(best[0]):
                break
        return best

    @property
    def _eps(self) -> float:
        return torch.finfo(self.subject.narrowest()).eps

    @property
    def _bound(self) -> float:
        """Relative error, in the Euclidean norm, that a sum of rounded terms may have: some spacings of its dtype."""
        return max(8 * self._eps, min(400 * self._eps, 5e-5))


def _error(ours: Tensor, other: Tensor, size: float = 0.0) -> float:
    """Distance in the Euclidean norm, relative to the second or to ``size`` if that is larger; of elements that are finite in both."""
    both = ours.isfinite() & other.isfinite()
    left, right = ours.double()[both], other.double()[both]
    norm, distance = max(size, float(right.norm())), float((left - right).norm())
    return distance / norm if norm else (math.inf if distance else 0.0)


def _difference(ours: Result, first: Result) -> str:
    """The first tensor that differs by more than atomics may: how many of its elements do, and its name; empty if none does."""
    others = first.named()
    for name, tensor in ours.named().items():
        other = others[name]
        differs = (tensor != other) & ~(tensor.isnan() & other.isnan())
        by_kind = bool((tensor.isfinite() != other.isfinite()).any())
        if bool(differs.any()) and (by_kind or _error(tensor, other) > 16 * torch.finfo(tensor.dtype).eps):
            return f"{int(differs.sum()):,} of {tensor.numel():,} elements of {name}"
    return ""


def _loses(wide: Result, made: Result) -> bool:
    """Whether a reference is not finite where the call itself is: then it is none."""
    narrow = made.named()
    return any(bool((narrow[name].isfinite() & ~tensor.isfinite()).any()) for name, tensor in wide.named().items())


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().nan_to_num(0, 0, 0).norm())


def _errors(ours: Result, other: Result) -> dict[str, float]:
    """The distance of each tensor; that of a gradient relative to the largest gradient, because some are 0 but for rounding."""
    largest = max((_norm(gradient) for gradient in other.gradients.values()), default=0.0)
    others = other.named()
    return {
        name: _error(tensor, others[name], largest if name.startswith("gradient") else 0.0)
        for name, tensor in ours.named().items()
    }
