"""Updates in place that rounding loses outside of optimizers: parameters that a program steps by itself, and averages that it keeps of them."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import schema_of
from dtypedoctor.instrument.frames import Line
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.silent.updates import HALF, MOSTLY, SAMPLED, is_checked
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import LostWrites
from dtypedoctor.values import dataclass

ARITHMETIC = frozenset({"add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_"})
"""Operators that change what is there. A copy is not one: of float32 weights it may well round to what was there before."""
MOST_FOLLOWED = 10_000
"""Tensors that are followed."""
CHECKS = 3
"""Checked writes by which a tensor is judged."""
LOST = 0.95
"""Share of the elements that float32 moves which have to stay as they are."""
SWEPT = 1000
"""Tensors that are new before those that are gone are looked for."""
SAME = 0.5
"""Share of the elements that have to be as the write before left them: memory that is used for something else in between holds other values."""


@dataclass(slots=True)
class _Followed:
    """What the checked writes of one operator to one piece of memory have come to."""

    dtype: str
    memory: int
    held: StorageWeakRef
    """Does not keep the memory."""
    line: Line | None = None
    writes: int = 0
    checks: int = 0
    same: bool = True
    wanted: int = 0
    lost: int = 0
    absmax: float = 0.0
    change: float = 0.0
    last: Tensor | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether it stood still although it should have moved."""
        return self.same and self.checks >= CHECKS and self.lost >= LOST * self.wanted


@dataclass(slots=True)
class Write:
    """A write that is about to happen: elements as they are before, and what float32 makes of them."""

    followed: _Followed
    target: Tensor
    stride: int
    before: Tensor
    wide: Tensor


class WriteCheck:
    """Writes a :class:`LostWrites` for each line whose updates in place leave half-precision tensors as they are.

    The same operator runs on a float32 copy of a few thousand elements. A tensor counts where several checks find that nearly all elements which float32
    moves have stayed as they are, and find it as the check before has left it. Only memory of the CPU is looked at.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._position = session.position
        self._followed: dict[tuple[Any, ...], _Followed] = {}
        self._over: list[_Followed] = []
        self._told: dict[Line | None, int] = {}
        self._sweep_at = SWEPT

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Write | None:
        """An operator outside of modules is about to write to its operands."""
        target = args[0] if args else None
        if not isinstance(target, Tensor) or target.dtype not in HALF or not target.numel():
            return None
        if target.device.type != "cpu":
            return None  # to read what has become of the elements would wait for the device
        if schema_of(func).name.removeprefix("aten::") not in ARITHMETIC or not measurable(target):
            return None
        followed = self._followed_of(func, target)
        if followed is None:
            return None
        followed.writes += 1
        if not is_checked(followed.writes):
            return None
        stride = -(-target.numel() // SAMPLED)
        operands = [_sampled(value, target, stride) for value in args[1:]]
        if (
            not target.is_contiguous()
            or any(one is None for one in operands)
            or any(isinstance(v, Tensor) for v in kwargs.values())
        ):
            return None
        with self._position.mute(), torch.no_grad():
            before = target.detach().reshape(-1)[::stride].clone()
            wide = before.float()
            func(wide, *operands, **kwargs)
        return Write(followed, target, stride, before, wide)

    def _followed_of(self, func: Any, target: Tensor) -> _Followed | None:
        """What is known of the tensor; begun anew for one that only has the address of another one that is gone."""
        key = (func, target.data_ptr(), target.shape)
        followed = self._followed.get(key)
        if followed is not None and not followed.held.expired():
            return followed
        if len(self._followed) >= self._sweep_at:
            self._sweep()
        self._end(key)
        if len(self._followed) >= MOST_FOLLOWED:
            return None
        held = StorageWeakRef(target.untyped_storage())
        followed = self._followed[key] = _Followed(dtype_name(target), target.data_ptr(), held)
        return followed

    def _sweep(self) -> None:
        """Forgets the values of tensors that are gone."""
        for key in [key for key, one in self._followed.items() if one.held.expired()]:
            self._end(key)
        self._sweep_at = min(len(self._followed) + SWEPT, MOST_FOLLOWED)

    def _end(self, key: tuple[Any, ...]) -> None:
        """The tensor is gone: what it has been judged by stays."""
        followed = self._followed.pop(key, None)
        if followed is not None and followed.checks >= CHECKS and len(self._over) < MOST_FOLLOWED:
            followed.last = None
            self._over.append(followed)

    def after(self, write: Write, line: Line | None) -> None:
        """It has written."""
        followed = write.followed
        with self._position.mute(), torch.no_grad():
            now = write.target.detach().reshape(-1)[:: write.stride]
            old = write.before.float()
            wanted = (write.wide != old) & write.wide.isfinite()
            numbers = (
                wanted.sum(),
                (wanted & (now == write.before)).sum(),
                old.abs().max(),
                (write.wide - old).abs().max(),
            )
            many, lost, absmax, change = torch.stack([number.double() for number in numbers]).tolist()
            unmoved = 1.0 if followed.last is None else float((followed.last == write.before).float().mean())
        stalled = followed.is_stalled
        followed.line = line
        followed.checks += bool(many)
        followed.same &= unmoved >= SAME
        followed.wanted += int(many)
        followed.lost += int(lost)
        followed.absmax, followed.change = max(followed.absmax, absmax), max(followed.change, change)
        followed.last = now.clone() if followed.same else None
        if followed.is_stalled and followed.checks > self._told.get(line, 0):
            self._told[line] = followed.checks
            self._tell(line)
        elif stalled and not followed.is_stalled and line in self._told:
            self._tell(line)

    def stop(self) -> None:
        """The program is over: what was written down of a line when its first tensor was checked becomes what holds of all."""
        for line in self._told:
            self._tell(line)

    def _tell(self, line: Line | None) -> None:
        everything = (*self._over, *self._followed.values())
        of_line = [one for one in everything if one.line == line and one.checks >= CHECKS]
        stalled = [one for one in of_line if one.is_stalled]
        if not of_line:
            return
        if not stalled or len(stalled) < MOSTLY * len(of_line):
            stalled = []  # withdraws what was written before
        worst = max(stalled or of_line, key=lambda one: one.wanted)
        self._session.emit(
            LostWrites(
                source="" if line is None else line.source,
                dtype=worst.dtype,
                tensors=len({(one.held, one.memory) for one in stalled}),
                compared=len({(one.held, one.memory) for one in of_line}),
                checks=worst.checks,
                wanted=sum(one.wanted for one in stalled),
                lost=sum(one.lost for one in stalled),
                absmax=worst.absmax,
                change=worst.change,
            )
        )


def _sampled(value: Any, target: Tensor, stride: int) -> Any:
    """The part of an operand that belongs to the elements compared, in float32; None where it has no such part."""
    if not isinstance(value, Tensor):
        return value
    if not measurable(value):
        return None
    if value.numel() == 1:
        return value.detach().float().reshape(())
    if value.shape != target.shape or not value.is_contiguous():
        return None
    return value.detach().reshape(-1)[::stride].float()
