"""What the state of an optimizer has lost on its way through a checkpoint: bits, in ``load_state_dict``, or its small values, where it was stored in float16."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.trace.records.execution import MomentsStoredInHalf, OptimizerStateCast
from dtypedoctor.unpatched import unseen_by_warnings

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["ResumeCheck"]

COMPARED = 1 << 16
"""Elements of a tensor that are looked at."""
DISTINCT = 8
"""Different values that have to be exact in float16 before float32 numbers are taken to have been stored in it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A tensor of an optimizer's state after loading. ``given`` is its dtype in the checkpoint; ``rounded`` counts the elements that the cast changed."""

    parameter: Tensor
    key: str
    tensor: Tensor
    given: torch.dtype
    rounded: int

    @property
    def is_narrower(self) -> bool:
        """Whether it has fewer bits than what the checkpoint holds."""
        return self.tensor.dtype in HALF and torch.finfo(self.tensor.dtype).eps > torch.finfo(self.given).eps


class ResumeCheck(Observer):
    """Follows ``load_state_dict`` of optimizers while started.

    Before the first step after it, it writes an :class:`OptimizerStateCast` where the optimizer goes on with state that has fewer bits than the
    checkpoint, and a :class:`MomentsStoredInHalf` where second moments were rounded to zero or inf in float16. A program that puts the state back in
    between, or never steps with it, has lost nothing.
    """

    between_looks: ClassVar[bool] = True

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._loaded: WeakKeyDictionary[Optimizer, list[_Loaded]] = WeakKeyDictionary()

    def start(self) -> None:
        """Begins to follow."""
        original = Optimizer.load_state_dict
        note = self.session.guard.shield(self._note, "the dtypes of some optimizer states")

        @functools.wraps(original)
        @unseen_by_warnings
        def load_state_dict(optimizer: Optimizer, state_dict: Any) -> Any:
            result = original(optimizer, state_dict)
            note(optimizer, state_dict)
            return result

        self.replace(Optimizer, "load_state_dict", load_state_dict)

    def _note(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        with self.position.mute(), torch.no_grad():
            self._loaded[optimizer] = list(_loaded(optimizer, state_dict))

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        loaded = self._loaded.pop(optimizer, None)
        if not loaded:
            return
        held = [one for one in loaded if optimizer.state.get(one.parameter, {}).get(one.key) is one.tensor]
        with self.position.mute(), torch.no_grad():
            self._tell_of_casts(optimizer, [one for one in held if one.is_narrower and one.rounded])
            self._tell_of_moments(optimizer, held)

    def _tell_of_casts(self, optimizer: Optimizer, cast: list[_Loaded]) -> None:
        if not cast:
            return
        casts: Counter[str] = Counter()
        for one in cast:
            casts[f"{dtype_name(torch.empty(0, dtype=one.given))}->{dtype_name(one.tensor)}"] += one.tensor.numel()
        found = OptimizerStateCast(
            optimizer=type(optimizer).__name__,
            casts=dict(casts),
            keys=sorted({one.key for one in cast}),
            parameters=len({id(one.parameter) for one in cast}),
            rounded=sum(one.rounded for one in cast),
            compared=sum(len(_some(one.tensor)) for one in cast),
        )
        self.session.once(found, type(optimizer).__name__)

    def _tell_of_moments(self, optimizer: Optimizer, held: list[_Loaded]) -> None:
        lost = _all_lost(held)
        if not lost:
            return
        found = MomentsStoredInHalf(
            optimizer=type(optimizer).__name__,
            keys=sorted({one.key for one, _ in lost}),
            parameters=len({id(one.parameter) for one, _ in lost}),
            became_zero=sum(zeros for _, (zeros, _) in lost),
            became_inf=sum(infinite for _, (_, infinite) in lost),
            compared=sum(len(_some(one.tensor)) for one, _ in lost),
        )
        self.session.once(found, type(optimizer).__name__)


def _all_lost(held: list[_Loaded]) -> list[tuple[_Loaded, tuple[int, int]]]:
    """Pairs each mean of squares with the other tensors of its parameter: where it is 0, they have to be 0 as well."""
    of_parameter: dict[int, list[_Loaded]] = {}
    for one in held:
        if one.tensor.dtype not in HALF:
            of_parameter.setdefault(id(one.parameter), []).append(one)
    found = [(one, _lost(one, others)) for others in of_parameter.values() for one in others]
    return [(one, lost) for one, lost in found if any(lost)]


def _loaded(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[_Loaded]:
    """What was loaded for each parameter, in tensors of its shape; a checkpoint numbers parameters by their order."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        given, own = state_dict["state"].get(number, {}), optimizer.state.get(parameter, {})
        for key, tensor in own.items():
            stored = given.get(key)
            if _is_state_of(parameter, tensor) and _is_state_of(parameter, stored):
                rounded = _some(stored).to(tensor.device).float() != _some(tensor).float()
                yield _Loaded(parameter, str(key), tensor, stored.dtype, int(rounded.sum()))


def _is_state_of(parameter: Tensor, value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.is_floating_point()
        and measurable(value)
        and value.numel() > 0
    )


def _some(tensor: Tensor) -> Tensor:
    """Elements of a tensor, evenly spaced."""
    return tensor.detach().flatten()[:: -(-tensor.numel() // COMPARED)]


def _lost(one: _Loaded, others: list[_Loaded]) -> tuple[int, int]:
    """How many elements of a mean of squares are 0 though another mean of the same gradients is not, and how many are inf; zeros if float16 is not why."""
    squares = _some(one.tensor)
    if bool((squares < 0).any()):
        return 0, 0
    signed = [values for other in others if bool(((values := _some(other.tensor)) < 0).any())]
    if not signed or not _went_through_float16(one, squares, signed):
        return 0, 0  # without a signed mean, nothing says that these are squares
    moved = torch.stack([values != 0 for values in signed]).any(0)
    return int(((squares == 0) & moved).sum()), int(squares.isinf().sum())


def _went_through_float16(one: _Loaded, squares: Tensor, signed: list[Tensor]) -> bool:
    """Whether float32 squares were float16 before: the checkpoint says so, or float16 holds each of them, or each of the means beside them if they are all 0."""
    if one.given is torch.float16:
        return True
    own = _different_in_float16(squares)
    return own is not None and (
        own >= DISTINCT or any((_different_in_float16(values) or 0) >= DISTINCT for values in signed)
    )


def _different_in_float16(values: Tensor) -> int | None:
    """How many different numbers there are besides 0 and inf; None if float16 does not hold one of them."""
    different = values[values.isfinite() & (values != 0)].unique()
    return len(different) if bool((different.half().to(different.dtype) == different).all()) else None
