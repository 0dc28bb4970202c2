"""Casts to float8 that clip large values, or make zeros of small ones, where a scale before the cast would keep them."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import Arguments
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import Float8Cast

__all__ = ["Float8Casts"]

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CASTS = {"aten._to_copy.default": 0, "aten.copy_.default": 1}
"""Operators that cast, with the place of what is cast among their operands."""
LOSSY = 0.25
"""Relative error, in the Euclidean norm, from which on a cast has lost information; float8's rounding makes up to 0.06."""
MOST = 1 << 20
"""Elements of a tensor that are measured, its first ones."""
HELPED = 4.0
"""So many times smaller the error is with a scale, where a scale is what the cast lacks: outliers defeat one, too."""


class Float8Casts(Observer):
    """Writes a :class:`Float8Cast` for each cast of finite values to float8 that loses much more than it would with a scale.

    The experiment is the same cast of the same values, multiplied by the dtype's largest value over their absmax before it, and divided
    after it, as float8 recipes do. A cast whose result is not finite is the watch's. Outside of modules a GPU's memory is looked
    at in the steps in which it is read.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._looking = self.session.guard.keeping("casts to float8 outside of modules")

    def saw(self, seen: Seen) -> None:
        """An operator has run inside of a module that is looked at."""
        place = _CASTS.get(seen.name)
        if place is None or not seen.results or len(seen.operands) <= place:
            return
        told = _lossy(seen.name, seen.operands[place], seen.results[0])
        if told is not None:
            self._tell(told, *self.here())

    def follows(self, func: Any) -> bool:
        """Whether an operator casts."""
        return str(func) == "aten._to_copy.default"

    def ran(self, func: Any, arguments: Arguments, result: Any) -> None:
        """A tensor was cast outside of modules."""
        operand = arguments[0][0] if arguments[0] else None
        if not isinstance(operand, Tensor) or not isinstance(result, Tensor):
            return
        if result.dtype in FLOAT8 and self.session.readings.reads(operand):
            with self._looking, self.session.position.mute(), torch.no_grad():
                told = _lossy("aten._to_copy.default", operand, result)
                if told is not None:
                    self._tell(told, source_of(sys._getframe()), None)

    def _tell(self, told: Float8Cast, source: str | None, fqn: str | None) -> None:
        self.session.once(replace(told, source=source), (fqn, source), fqn)


def _lossy(op: str, source: Tensor, result: Tensor) -> Float8Cast | None:
    """What a cast to float8 has lost; None where that is little, where a scale would not help, and for other casts."""
    if result.dtype not in FLOAT8 or not measurable(source) or source.dtype.itemsize < 2 or source.numel() < 2:
        return None
    if source.shape != result.shape:  # a copy that broadcasts
        return None
    exact, cast = (tensor.detach().reshape(-1)[:MOST].float() for tensor in (source, result))
    found = _measured(exact, cast, result.dtype)
    if found is None or found["relative_error"] < max(LOSSY, HELPED * found["scaled_error"]):
        return None
    return Float8Cast(
        op=op,
        source=None,
        from_=dtype_name(source),
        to=dtype_name(result),
        elements=exact.numel(),
        clipped=int(found["clipped"]),
        vanished=int(found["vanished"]),
        absmax=found["absmax"],
        relative_error=found["relative_error"],
        scaled_error=found["scaled_error"],
    )


def _measured(exact: Tensor, cast: Tensor, dtype: torch.dtype) -> dict[str, float] | None:
    """Numbers of a :class:`Float8Cast`, read from the device at once; None for values or a result that are not finite, and for zeros."""
    largest = torch.finfo(dtype).max
    absmax, norm = exact.abs().max(), exact.norm()
    scale = largest / absmax
    scaled = (exact * scale).to(dtype).float() / scale
    numbers = torch.stack(
        [
            absmax,
            norm,
            (exact - cast).norm() / norm,
            (exact - scaled).norm() / norm,
            ((exact.abs() > largest) & (cast.abs() == largest)).sum(),
            ((exact != 0) & (cast == 0)).sum(),
        ]
    )
    if not bool(numbers.isfinite().all()):
        return None
    names = ("absmax", "norm", "relative_error", "scaled_error", "clipped", "vanished")
    return dict(zip(names, numbers.tolist(), strict=True))
