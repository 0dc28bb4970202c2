"""Updates in place that rounding loses outside of optimizers: parameters that a program steps by itself, and averages that it keeps of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import schema_of
from dtypedoctor.instrument.frames import Line
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.silent.observer import SUMS, Observer
from dtypedoctor.instrument.silent.updates import MOSTLY, SAMPLED, is_checked
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.trace.records.silent import LostWrites, RoundedUse

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

BACK, FURTHER = 2.0**-6, 4
"""What is left in float64 of the way that values have gone and come back, where what was added is taken away rounded to bfloat16; and how much further from the start the
values have to be that half precision holds."""
UNDONE, MOST_UNDONE = 2, 256
"""Times that a tensor comes back before it is told of, and tensors that are followed."""
_ON_LISTS = "_foreach_"
"""How the names of operators on lists of tensors begin."""
ARITHMETIC = frozenset({"add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_"})
"""Operators that change what is there. A copy is not one: of float32 weights it may well round to what was there before."""
MOST_FOLLOWED = 10_000
"""Tensors that are followed."""
CHECKS = 3
"""Checked writes, one after another, by which a tensor is judged: what has moved before, in a first copy of the weights say, does not count."""
LOST = 0.95
"""Share of the elements that float32 moves which have to stay as they are."""
SWEPT = 1000
"""Tensors that are new before those that are gone are looked for."""
KEPT = 2
"""Checked writes of which what was lost has to be kept: equal gradients look like it once, where a program sums them itself."""
COMPARED = 512
"""Elements of what was lost that are compared."""
SIMILAR, MOSTLY_SIMILAR = 2.0**-7, 0.9
"""Difference that rounding to bfloat16 explains; and the share of the elements that have to agree so far."""
SAME = 0.5
"""Share of the elements that have to be as the write before left them: memory that is used for something else in between holds other values."""


@dataclass(slots=True)
class _Followed:
    """What the checked writes of one operator to one piece of memory have come to.

    Attributes:
        held: does not keep the memory.
        lost_values: what rounding took of the last write, where that was checked, of a few elements.
        is_kept: whether a sum since then has had the same values as an operand.
        kept, followed_on: checked writes of which that holds, and all after which there was another write.
    """

    dtype: str
    memory: int
    held: StorageWeakRef
    elements: int
    line: Line | None = None
    writes: int = 0
    sums: int = 0
    """Writes that add a tensor of its size."""
    judged: int = 0
    """Checks in which float32 moves something; ``checks`` are those of them since it has last moved."""
    checks: int = 0
    wanted: int = 0
    lost: int = 0
    absmax: float = 0.0
    change: float = 0.0
    last: Tensor | None = None
    lost_values: "_Taken | None" = None
    is_kept: bool = False
    kept: int = 0
    followed_on: int = 0

    @property
    def is_stalled(self) -> bool:
        """Whether it stood still although it should have moved."""
        lost = self.checks >= CHECKS and self.lost >= LOST * self.wanted
        return lost and not self.kept >= min(KEPT, max(self.followed_on, 1))

    @property
    def is_merged_in_vain(self) -> bool:
        """Whether its last write should have moved it and has not."""
        return bool(self.wanted) and self.lost >= LOST * self.wanted

    def written_again(self) -> None:
        """Another write follows the one that was checked."""
        if self.lost_values is not None:
            self.followed_on += 1
            self.kept += self.is_kept
            self.lost_values, self.is_kept = None, False

    def forget(self) -> None:
        """It has moved: begins anew."""
        self.checks = self.wanted = self.lost = self.kept = self.followed_on = 0
        self.absmax = self.change = 0.0


@dataclass(slots=True)
class Write:
    """A write that is about to happen: elements as they are before, and what float32 makes of them."""

    followed: _Followed
    target: Tensor
    stride: int
    before: Tensor
    wide: Tensor
    exact: Tensor
    """The same in float64: what float32 leaves of a small change of a large number differs from it."""
    undone: "_Undone | None"
    all_along: Tensor
    """What float64 makes of it from where ``undone`` begins."""


@dataclass(slots=True)
class _Undone:
    """A tensor to which something is added and taken away again.

    Attributes:
        start: elements as they were before.
        exact: what they would be in float64 by now; ``last`` what they are.
        away: how far the float64 values have gone since they were last at the start.
        returns: how often the float64 values have come back to the start, and ``lost`` how many elements were others then.
    """

    start: Tensor
    exact: Tensor
    last: Tensor
    away: float = 0.0
    line: Line | None = None
    returns: int = 0
    lost: int = 0
    deviation: float = 0.0

    def wrote(self, exact: Tensor, now: Tensor, line: Line | None) -> None:
        """The tensor was written to, and should be ``exact``."""
        self.away = max(self.away, float((self.exact - self.start).abs().max()))
        self.exact, self.last = exact, now
        left = (exact - self.start).abs()
        if float(left.max()) < BACK * self.away:
            difference = (now.double() - self.start).abs()
            self.line, self.returns, self.away = line, self.returns + 1, 0.0
            self.lost, self.deviation = int((difference > FURTHER * left).sum()), float(difference.max())


class WriteCheck(Observer):
    """Writes a :class:`LostWrites` for each line whose updates in place leave half-precision tensors as they are.

    A parameter to which the program adds a tensor only once, as where an adapter is merged, is judged by that one write, at the end.

    The same operator runs on a float32 copy of a few thousand elements. A tensor counts where several checks find that nearly all elements which float32
    moves have stayed as they are, and find it as the check before has left it; not where a sum between two writes takes what the first has lost,
    which so is not lost. Of a GPU's memory as much is looked at as its readings afford.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._followed: dict[tuple[Any, ...], _Followed] = {}
        self._over: list[_Followed] = []
        self._told: dict[Line | None, int] = {}
        self._merges: list[_Followed] = []
        self._undone: dict[tuple[int, torch.Size], _Undone] = {}
        self._losses: dict[torch.Size, dict[int, _Followed]] = {}
        self._sweep_at = SWEPT

    def writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Write]:
        """An operator outside of modules is about to write to its operands, or to sum them; one on lists does so for each of their tensors."""
        name = schema_of(func).name.removeprefix("aten::")
        if name.startswith(_ON_LISTS):
            name = name.removeprefix(_ON_LISTS)
            # a scaled list is one of gradients that are clipped, which are made anew each time
            rows = zip(*(arg if isinstance(arg, (list, tuple)) else repeat(arg) for arg in args), strict=False)
            func = getattr(torch.ops.aten, name, None) if name in ARITHMETIC - {"mul_", "div_"} else None
            return (
                [write for row in rows if (write := self._before(func, name, row, kwargs))] if func is not None else []
            )
        write = self._before(func, name, args, kwargs)
        return [] if write is None else [write]

    def _before(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Write | None:
        if (
            self._losses and name in SUMS
        ):  # Kahan summation keeps what rounding took of a write, and adds it to the next one
            self._notice_kept(args)
        target = args[0] if args else None
        if not isinstance(target, Tensor) or target.dtype not in HALF or not target.numel():
            return None
        if name not in ARITHMETIC or not measurable(target):
            return None
        followed = self._followed_of(func, target)
        if followed is None:
            return None
        followed.writes += 1
        followed.written_again()
        self._forget_loss(target.shape, followed)
        if not is_checked(followed.writes) or not self.session.readings.affords(target):
            return None
        if _adds_tensor(name, args) and len(self._merges) < MOST_FOLLOWED:
            followed.sums += 1
            if followed.sums == 1 and self._is_parameter(target):
                self._merges.append(followed)
        stride = -(-target.numel() // SAMPLED)
        operands = [sampled(value, target, stride) for value in args[1:]]
        if (
            not target.is_contiguous()
            or any(one is None for one in operands)
            or any(isinstance(v, Tensor) for v in kwargs.values())
        ):
            return None
        with self.position.mute(), torch.no_grad():
            before = target.detach().reshape(-1)[::stride].clone()
            wide, exact = before.float(), before.double()
            func(wide, *operands, **kwargs)
            exactly = [one.double() if isinstance(one, Tensor) else one for one in operands]
            func(exact, *exactly, **kwargs)
            undone = self._undone_of(target, before) if _adds_tensor(name, args) else None
            all_along = func(undone.exact.clone(), *exactly, **kwargs) if undone is not None else exact
        return Write(followed, target, stride, before, wide, exact, undone, all_along)

    def _undone_of(self, target: Tensor, before: Tensor) -> _Undone | None:
        """What is known of a tensor to which something is added; begun anew where something else has written to it, None where enough is known."""
        key = (target.data_ptr(), target.shape)
        known = self._undone.get(key)
        if known is None and len(self._undone) >= MOST_UNDONE:
            return None
        if known is not None and known.returns >= UNDONE:
            return None
        if known is None or not torch.equal(known.last, before):
            start = before.double()
            known = self._undone[key] = _Undone(start, start, before)
        return known

    def _forget_loss(self, shape: torch.Size, followed: _Followed) -> None:
        """Whether what was lost of the last write was kept is known by now, or never will be."""
        losses = self._losses.get(shape, {})
        if losses.get(followed.memory) is followed:
            del losses[followed.memory]
            if not losses:
                del self._losses[shape]

    def _notice_kept(self, args: tuple[Any, ...]) -> None:
        """Whether an operand of a sum is what a write before has lost; not of the next write itself, where equal gradients would be."""
        tensors = [one for one in args[:2] if isinstance(one, Tensor)]
        losses = self._losses.get(tensors[0].shape) if tensors else None
        if losses is None or tensors[0].data_ptr() in losses:
            return
        if not all(map(self.session.readings.affords, tensors)):
            for one in losses.values():
                one.is_kept = True  # it may be: nobody looks
            return
        for taken in filter(None, map(_taken_of, tensors)):
            for one in losses.values():
                one.is_kept |= taken.is_of(one.lost_values)

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
        followed = self._followed[key] = _Followed(dtype_name(target), target.data_ptr(), held, target.numel())
        return followed

    def _sweep(self) -> None:
        """Forgets the values of tensors that are gone."""
        for key in [key for key, one in self._followed.items() if one.held.expired()]:
            self._end(key)
        self._sweep_at = min(len(self._followed) + SWEPT, MOST_FOLLOWED)

    def _end(self, key: tuple[Any, ...]) -> None:
        """The tensor is gone: what it has been judged by stays."""
        followed = self._followed.pop(key, None)
        if followed is not None:
            self._forget_loss(key[-1], followed)
        if followed is not None and followed.judged >= CHECKS and len(self._over) < MOST_FOLLOWED:
            followed.last = None
            self._over.append(followed)

    def wrote(self, before: Sequence[Write], line: Line | None) -> None:
        """It has written."""
        for write in before:
            self._after(write, line)

    def _after(self, write: Write, line: Line | None) -> None:
        followed = write.followed
        with self.position.mute(), torch.no_grad():
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
            if write.undone is not None:
                write.undone.wrote(write.all_along, now.clone(), line)
        stalled = followed.is_stalled
        followed.line = line
        followed.judged += bool(many)
        moves = lost < LOST * many
        if moves or unmoved < SAME:
            followed.forget()
        if not moves:
            followed.checks += bool(many)
            followed.wanted += int(many)
            followed.lost += int(lost)
        followed.absmax, followed.change = max(followed.absmax, absmax), max(followed.change, change)
        followed.last = now.clone()
        if many and not moves:
            rest = (write.exact - now.double())[:COMPARED]
            followed.lost_values = _Taken(rest, float(rest.abs().sum()))
            self._losses.setdefault(write.target.shape, {})[followed.memory] = followed
        if followed.is_stalled and followed.checks > self._told.get(line, 0):
            self._told[line] = followed.checks
            self._tell(line)
        elif stalled and not followed.is_stalled and line in self._told:
            self._tell(line)

    def stop(self) -> None:
        """The program is over: what was written down of a line when its first tensor was checked becomes what holds of all."""
        for line in self._told:
            self._tell(line)
        self._tell_of_undone()
        for line in {one.line for one in self._merges} - set(self._told):
            self._tell_of_merges([one for one in self._merges if one.line == line])

    def _tell_of_undone(self) -> None:
        """Writes a :class:`RoundedUse` for each line that takes away what was added before, and does not get back what was there."""
        known = [one for one in self._undone.values() if one.returns >= UNDONE]
        for line in dict.fromkeys(one.line for one in known):
            of_line = [one for one in known if one.line == line]
            worst, source = max(of_line, key=lambda one: one.deviation), "" if line is None else line.source
            at = int((worst.last.double() - worst.start).abs().argmax())
            self.session.emit(
                RoundedUse(
                    use="restored",
                    op="aten.sub_.Tensor",
                    source=source,
                    made_by="aten.add_.Tensor",
                    made_at="",
                    dtype=dtype_name(worst.last),
                    value=f"{float(worst.last[at]):.6g}",
                    exact=f"{float(worst.start[at]):.6g}",
                    changed=sum(one.lost for one in of_line),
                    of=sum(one.start.numel() for one in of_line),
                )
            )

    def _is_parameter(self, target: Tensor) -> bool:
        held = (tensor for _, _, tensor, _, is_buffer in self.session.names.tensors() if not is_buffer)
        return any(one.shape == target.shape and one.data_ptr() == target.data_ptr() for one in held)

    def _tell_of_merges(self, once: list[_Followed]) -> None:
        once = [one for one in once if one.sums == 1]
        lost = [one for one in once if one.is_merged_in_vain]
        if not lost or _elements(lost) < MOSTLY * _elements(once):
            return
        self._emit(lost[0].line, max(lost, key=lambda one: one.wanted), lost, once)

    def _tell(self, line: Line | None) -> None:
        everything = (*self._over, *self._followed.values())
        of_line = [one for one in everything if one.line == line and one.judged >= CHECKS]
        stalled = [one for one in of_line if one.is_stalled]
        if not of_line:
            return
        if _elements(stalled) < MOSTLY * _elements(of_line):
            stalled = []  # withdraws what was written before
        self._emit(line, max(stalled or of_line, key=lambda one: one.wanted), stalled, of_line)

    def _emit(
        self, line: Line | None, worst: _Followed, stalled: Sequence[_Followed], compared: Sequence[_Followed]
    ) -> None:
        self.session.emit(
            LostWrites(
                source="" if line is None else line.source,
                dtype=worst.dtype,
                tensors=len({(one.held, one.memory) for one in stalled}),
                compared=len({(one.held, one.memory) for one in compared}),
                checks=worst.checks,
                wanted=sum(one.wanted for one in stalled),
                lost=sum(one.lost for one in stalled),
                absmax=worst.absmax,
                change=worst.change,
            )
        )


@dataclass(frozen=True, slots=True)
class _Taken:
    """A few elements of a tensor, and the sum of their magnitudes, which is compared first."""

    values: Tensor
    size: float

    def is_of(self, lost: "_Taken | None") -> bool:
        """Whether these are the values that were lost, or those with the other sign, as far as rounding lets them be."""
        if lost is None or not self.size or not math.isclose(self.size, lost.size, rel_tol=2 * SIMILAR):
            return False
        if self.values.shape != lost.values.shape:
            return False
        near = SIMILAR * lost.values.abs()
        agree = [((self.values - one).abs() <= near).double().mean() for one in (lost.values, -lost.values)]
        return float(max(agree)) >= MOSTLY_SIMILAR


def _taken_of(tensor: Tensor) -> _Taken | None:
    """The elements of an operand by which it is compared with what was lost; None where it has none."""
    if not tensor.is_floating_point() or not measurable(tensor) or not tensor.is_contiguous():
        return None
    values = tensor.detach().reshape(-1)[:: -(-tensor.numel() // SAMPLED)][:COMPARED].double()
    return _Taken(values, float(values.abs().sum()))


def _adds_tensor(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a whole tensor is added; a number, an epsilon say, may well be too small to count."""
    return name in ("add_", "sub_") and isinstance(args[1], Tensor) and args[1].shape == args[0].shape


def _elements(tensors: list[_Followed]) -> int:
    """How many elements they have: of a line, weights that begin at zero and move may be as many tensors as those that stand still."""
    return sum(one.elements for one in tensors)


def sampled(value: Any, target: Tensor, stride: int) -> Any:
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
