"""Tensors that a program changes outside of optimizers, and that half precision leaves as they are although the same operators move them in float64.

Weights that a script steps by itself, moving averages of them, adapters that are merged. What changes in place is compared around each write; what is
computed anew, and assigned or copied back (``target.copy_(tau * source + (1 - tau) * target)``), from one round to the next.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import memory_key, schema_of
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import Arguments
from dtypedoctor.instrument.silent.observer import SUMS, Observer
from dtypedoctor.instrument.silent.updates import MOSTLY, SAMPLED, is_checked
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.trace.records.silent import LostWrites, RoundedUse

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["WriteCheck"]

ARITHMETIC = frozenset({"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"})
"""Operators that change what is there, also in place. A copy is none: of float32 weights it may well round to what was there before."""
_ON_LISTS = frozenset({f"_foreach_{name}_" for name in ARITHMETIC - {"mul", "div"}})
"""The same on lists of tensors. A scaled list is one of gradients that are clipped, which are made anew each time."""
_ASSIGNS = "copy_"
MOST_FOLLOWED = 10_000
"""Tensors that are followed."""
MOST_COMPUTED, ANEW = 2_048, 1_024
"""Tensors that are followed while they are computed anew, and elements of each, 12 MiB at most."""
SMALL = 64
"""Elements up to which a tensor that is computed anew is a sum, which :mod:`shadows` follows."""
ALLOWANCE, FOLLOWED, PERIOD = 8_192, 4_096, 65_536
"""Operators on averages that are all followed, 60 µs each; after them so many of so many."""
CHECKS = 3
"""Rounds, one after another, by which a tensor is judged: what has moved before, in a first copy of the weights say, does not count."""
LOST = 0.95
"""Share of the elements that float64 moves which have to stay as they are."""
NOISE = torch.finfo(torch.float32).eps / 2
ROUNDED = 2.0**-8
"""Relative changes that are no movement: what float32 would round away, too; and of what is added in half precision, in the average of two equal values for example."""
SAME = 0.5
"""Share of the elements that have to be as the write before left them: memory that is used for something else in between holds other values."""
SWEPT = 1000
"""Tensors that are new before those that are gone are looked for."""
KEPT = 2
"""Checked writes of which what was lost has to be kept: equal gradients look like it once, where a program sums them itself."""
COMPARED = 512
"""Elements of what was lost that are compared."""
SIMILAR, MOSTLY_SIMILAR = 2.0**-7, 0.9
"""Difference that rounding to bfloat16 explains; and the share of the elements that have to agree so far."""
BACK, FURTHER = 2.0**-6, 4
"""What is left in float64 of the way that values have gone and come back, where what was added is taken away rounded to bfloat16; and how much further from the start the
values have to be that half precision holds."""
UNDONE, MOST_UNDONE = 2, 256
"""Times that a tensor comes back before it is told of, and tensors that are followed."""


@dataclass(slots=True)
class _Followed:
    """What the rounds of one tensor have come to, those of one operator where it is written in place.

    Attributes:
        memory, held: by which it is known; does not keep the memory.
        judged: rounds in which float64 moves something; ``checks`` are those of them since it has last moved, as are the numbers after them.
        last: what the last round has left.
        lost_values: what rounding took of the last write in place, of a few elements.
        is_kept: whether a sum since then has had the same values as an operand.
        kept, followed_on: writes of which that holds, and all after which there was another write.
        writes, sums: in place; those that add a tensor of its size.
    """

    dtype: str
    elements: int
    memory: int
    held: StorageWeakRef
    in_place: bool = True
    line: Line | None = None
    judged: int = 0
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
    writes: int = 0
    sums: int = 0

    @property
    def is_stalled(self) -> bool:
        """Whether it stood still although it should have moved, and nothing keeps what it has lost."""
        return self.checks >= CHECKS and not self.kept >= min(KEPT, max(self.followed_on, 1))

    def close(self, before: Tensor, exact: Tensor, now: Tensor, swing: Tensor | float = 0.0) -> bool:
        """A round is over, and should have led from ``before`` to ``exact``; whether it has stood still. ``swing`` is how far it went on the way."""
        old = before.double()
        way = (exact - old).abs()
        moves = (way > NOISE * old.abs() + ROUNDED * swing) & exact.isfinite()
        again = 1.0 if self.last is None else (self.last == before).double().mean()
        numbers = (moves.sum(), (moves & (now == before)).sum(), old.abs().max(), torch.where(moves, way, 0.0).max())
        wanted, lost, absmax, change, same = torch.stack(
            [torch.as_tensor(n).double().to(old.device) for n in (*numbers, again)]
        ).tolist()
        stands = lost >= LOST * wanted
        self.judged += wanted > 0
        if not stands or same < SAME:
            self.checks = self.wanted = self.lost = self.kept = self.followed_on = 0
            self.absmax = self.change = 0.0
        if stands and wanted:
            self.checks += 1
            self.wanted, self.lost = self.wanted + int(wanted), self.lost + int(lost)
            self.absmax, self.change = max(self.absmax, absmax), max(self.change, change)
        self.last = now
        return stands and wanted > 0

    def written_again(self) -> None:
        """Another write follows the one that was checked."""
        if self.lost_values is not None:
            self.followed_on += 1
            self.kept += self.is_kept
            self.lost_values, self.is_kept = None, False


@dataclass(slots=True)
class _Write:
    """A write in place that is about to happen: elements as they are before, and what float64 makes of them."""

    followed: _Followed
    target: Tensor
    stride: int
    before: Tensor
    exact: Tensor
    undone: "_Undone | None"
    all_along: Tensor
    """What float64 makes of it from where ``undone`` begins."""


@dataclass(slots=True)
class _Round:
    """A tensor that is computed from itself by several operators: where that begins, elements as they were then, what float64 has made of them since, and how far these
    have been from the start."""

    begins: tuple[Any, Line | None]
    followed: _Followed
    start: Tensor
    exact: Tensor
    swing: Tensor | float = 0.0
    rounds: int = 0

    def close(self, now: Tensor) -> None:
        """The next round begins."""
        self.followed.close(self.start, self.exact, now, self.swing)
        self.start, self.exact, self.swing = now, now.double(), 0.0
        self.rounds += 1


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
    """Writes a :class:`LostWrites` for each line whose updates leave half-precision tensors as they are, and a :class:`RoundedUse` for one that does not undo what was added.

    The same operators run on float64 copies of a thousand elements or more. A tensor counts where several rounds find that nearly all elements which move there
    have stayed as they are; not where a sum between two writes takes what the first has lost, which so is not lost. A parameter to which the program adds a
    tensor only once, as where an adapter is merged, is judged by that one write, at the end. Of a GPU's memory as much is looked at as its readings afford, and no average of
    which gradients are computed.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._looking = self.session.guard.keeping("averages in half precision")
        self._written: dict[tuple[Any, ...], _Followed] = {}
        self._computed: dict[int, tuple[StorageWeakRef, _Round]] = {}
        self._computations = 0
        self._judged: dict[int, _Followed] = {}
        self._told: dict[Line | None, int] = {}
        self._merges: list[_Followed] = []
        self._undone: dict[tuple[int, torch.Size], _Undone] = {}
        self._losses: dict[torch.Size, dict[int, _Followed]] = {}
        self._sweep_at = SWEPT

    def writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Write]:
        """An operator outside of modules is about to write to its operands, or to sum them; one on lists does so for each of their tensors."""
        name = schema_of(func).name.removeprefix("aten::")
        rows: Iterator[tuple[Any, ...]] = iter([args])
        if name in _ON_LISTS:
            name = name.removeprefix("_foreach_")
            func = getattr(torch.ops.aten, name)
            rows = zip(*(arg if isinstance(arg, (list, tuple)) else repeat(arg) for arg in args), strict=False)
        return [write for row in rows if (write := self._before(func, name, row, kwargs)) is not None]

    def _before(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Write | None:
        if self._losses and name in SUMS:
            self._notice_kept(args)
        target = args[0] if args else None
        if not _is_half(target) or not (name.endswith("_") and name[:-1] in ARITHMETIC):
            return None
        followed = self._followed_of(func, target)
        if followed is None:
            return None
        followed.writes += 1
        followed.written_again()
        self._forget_loss(target.shape, followed)
        if not is_checked(followed.writes) or not self.session.readings.affords(target):
            return None
        # a number, an epsilon say, may well be too small to count
        adds = name in ("add_", "sub_") and isinstance(args[1], Tensor) and args[1].shape == target.shape
        if adds and len(self._merges) < MOST_FOLLOWED:
            followed.sums += 1
            if followed.sums == 1 and self._is_parameter(target):
                self._merges.append(followed)
        stride = -(-target.numel() // SAMPLED)
        operands = _sampled(args[1:], kwargs, target, stride)
        if operands is None:
            return None
        with self.position.mute(), torch.no_grad():
            before = target.detach().reshape(-1)[::stride].clone()
            undone = self._undone_of(target, before) if adds else None
            exact = func(before.double(), *operands, **kwargs)
            all_along = func(undone.exact.clone(), *operands, **kwargs) if undone is not None else exact
        return _Write(followed, target, stride, before, exact, undone, all_along)

    def wrote(self, before: Sequence[_Write], line: Line | None) -> None:
        """It has written."""
        for write in before:
            followed = write.followed
            stalled = followed.is_stalled
            followed.line = line
            with self.position.mute(), torch.no_grad():
                now = write.target.detach().reshape(-1)[:: write.stride].clone()
                if followed.close(write.before, write.exact, now):
                    rest = (write.exact - now.double())[:COMPARED]
                    followed.lost_values = _Taken(rest, float(rest.abs().sum()))
                    self._losses.setdefault(write.target.shape, {})[followed.memory] = followed
                if write.undone is not None:
                    write.undone.wrote(write.all_along, now, line)
            self._judge(followed, stalled)

    def _judge(self, followed: _Followed, was_stalled: bool) -> None:
        """Tells of the line of a tensor that has stood still once more, or that moves again."""
        line = followed.line
        if followed.judged >= CHECKS and len(self._judged) < MOST_FOLLOWED:
            self._judged[id(followed)] = followed
        if followed.is_stalled and is_checked(followed.checks) and followed.checks > self._told.get(line, 0):
            self._told[line] = followed.checks
            self._tell(line)
        elif was_stalled and not followed.is_stalled and line in self._told:
            self._tell(line)

    def _followed_of(self, func: Any, target: Tensor) -> _Followed | None:
        """What is known of a tensor that is written in place; begun anew for one that only has the address of another one that is gone."""
        key = (func, target.data_ptr(), target.shape)
        followed = self._written.get(key)
        if followed is not None and not followed.held.expired():
            return followed
        if len(self._written) >= self._sweep_at:
            for gone in [gone for gone, tensor in self._written.items() if tensor.held.expired()]:
                self._end(gone)
            self._sweep_at = min(len(self._written) + SWEPT, MOST_FOLLOWED)
        self._end(key)
        if len(self._written) >= MOST_FOLLOWED:
            return None
        held = StorageWeakRef(target.untyped_storage())
        followed = self._written[key] = _Followed(dtype_name(target), target.numel(), target.data_ptr(), held)
        return followed

    def _end(self, key: tuple[Any, ...]) -> None:
        """The tensor is gone: what it has been judged by stays."""
        followed = self._written.pop(key, None)
        if followed is not None:
            self._forget_loss(key[-1], followed)
            followed.last = None

    def _forget_loss(self, shape: torch.Size, followed: _Followed) -> None:
        """Whether what was lost of the last write was kept is known by now, or never will be."""
        losses = self._losses.get(shape, {})
        if losses.get(followed.memory) is followed:
            del losses[followed.memory]
            if not losses:
                del self._losses[shape]

    def _notice_kept(self, args: tuple[Any, ...]) -> None:
        """Whether an operand of a sum is what a write before has lost, as in Kahan summation; not of the next write itself, where equal gradients would be."""
        tensors = [operand for operand in args[:2] if isinstance(operand, Tensor)]
        losses = self._losses.get(tensors[0].shape) if tensors else None
        if losses is None or tensors[0].data_ptr() in losses:
            return
        if not all(map(self.session.readings.affords, tensors)):
            for followed in losses.values():
                followed.is_kept = True  # it may be: nobody looks
            return
        for taken in filter(None, map(_taken_of, tensors)):
            for followed in losses.values():
                followed.is_kept |= taken.is_of(followed.lost_values)

    def _undone_of(self, target: Tensor, before: Tensor) -> _Undone | None:
        """What is known of a tensor to which something is added; begun anew where something else has written to it, None where enough is known."""
        key = (target.data_ptr(), target.shape)
        known = self._undone.get(key)
        if len(self._undone) >= MOST_UNDONE if known is None else known.returns >= UNDONE:
            return None
        if known is None or not torch.equal(known.last, before):
            start = before.double()
            known = self._undone[key] = _Undone(start, start, before)
        return known

    def follows(self, func: Any) -> bool:
        """Whether an operator may be a part of the arithmetic of an average."""
        return _name(func) in ARITHMETIC | {_ASSIGNS}

    def ran(self, func: Any, arguments: Arguments, result: Any) -> None:
        """An operator outside of modules has computed something anew, or copied it into other memory."""
        if self.position.backward_depth or not self._may_be_average(arguments[0], result):
            return
        with self._looking, self.position.mute(), torch.no_grad():
            if _name(func) == _ASSIGNS:
                self._assigned(arguments[0][1], result)
            elif not result.requires_grad and result.is_contiguous() and self._is_turn():
                self._compute(func, *arguments, result, line_of(sys._getframe()))

    def _may_be_average(self, args: tuple[Any, ...], result: Any) -> bool:
        if not isinstance(result, Tensor) or result.numel() <= SMALL:
            return False
        # of a wider dtype only what has come from half precision, where the weights beside it are wide
        wide = result.dtype is torch.float32 and any(self._round_of(operand) is not None for operand in args[:2])
        return (wide or _is_half(result)) and self.session.readings.reads(result)

    def _assigned(self, value: Any, target: Tensor) -> None:
        """What was computed from a tensor is copied into one of half precision, into itself for the most part."""
        known = self._round_of(value)
        if known is not None and target.dtype in HALF and target.is_contiguous() and value.shape == target.shape:
            self._keep(target, known)

    def _compute(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, line: Line | None
    ) -> None:
        # of two operands that may change places, that is built up which has been for longer
        known = [self._round_of(operand) for operand in args[:2]]
        second = len(known) == 2 and _name(func) in ("add", "mul") and _rounds(known[1]) > _rounds(known[0])
        target = args[second]
        if not isinstance(target, Tensor) or target.shape != result.shape:
            return
        if known[second] is None and (target.dtype is not result.dtype or target.dtype not in HALF):
            return
        stride = -(-target.numel() // ANEW)
        operands = _sampled(args, kwargs, target, stride)
        if operands is None:
            return
        going_on = self._going_on(target, known[second], (func, line), stride)
        operands[second] = going_on.exact
        going_on.exact = func(*operands, **kwargs)
        going_on.swing = (going_on.exact - going_on.start.double()).abs().clamp_min(going_on.swing)
        self._keep(result, going_on)

    def _going_on(self, target: Tensor, known: _Round | None, begins: tuple[Any, Line | None], stride: int) -> _Round:
        """The round that ``target`` is in; a new one where it begins, or is not known."""
        now = target.detach().reshape(-1)[::stride].clone()
        if known is None or known.start.shape != now.shape:
            held = StorageWeakRef(target.untyped_storage())
            followed = _Followed(dtype_name(target), target.numel(), 0, held, in_place=False, line=begins[1])
            return _Round(begins, followed, now, now.double())
        if known.begins == begins:
            was_stalled = known.followed.is_stalled
            known.close(now)
            self._judge(known.followed, was_stalled)
        return known

    def _round_of(self, value: Any) -> _Round | None:
        """What a value is computed from; None where that is not known."""
        if not self._computed or not isinstance(value, Tensor):
            return None
        held, known = self._computed.get(memory_key(value.untyped_storage()), (None, None))
        return None if held is None or held.expired() else known

    def _keep(self, result: Tensor, known: _Round) -> None:
        if len(self._computed) >= MOST_COMPUTED:
            self._computed = {at: kept for at, kept in self._computed.items() if not kept[0].expired()}
        if len(self._computed) < MOST_COMPUTED:
            storage = result.untyped_storage()
            self._computed[memory_key(storage)] = (StorageWeakRef(storage), known)

    def _is_turn(self) -> bool:
        """Whether averages are followed now; where it begins anew, what was known is of rounds that were not all seen."""
        self._computations += 1
        if self._computations <= ALLOWANCE or self._computations % PERIOD < FOLLOWED:
            return True
        self._computed.clear()
        return False

    def stop(self) -> None:
        """The program is over: what was written down of a line when its first tensor was checked becomes what holds of all."""
        for line in self._told:
            self._tell(line)
        self._tell_of_undone()
        once = [tensor for tensor in self._merges if tensor.sums == 1]
        for line in {tensor.line for tensor in once} - set(self._told):
            self._tell_of_merges(line, [tensor for tensor in once if tensor.line == line])

    def _tell_of_merges(self, line: Line | None, once: list[_Followed]) -> None:
        """Tells of a line that has added a tensor to each of some parameters once."""
        lost = [tensor for tensor in once if tensor.wanted]
        if lost and _elements(lost) >= MOSTLY * _elements(once):
            self._emit(line, max(lost, key=lambda tensor: tensor.wanted), lost, once)

    def _tell_of_undone(self) -> None:
        """Writes a :class:`RoundedUse` for each line that takes away what was added before, and does not get back what was there."""
        known = [undone for undone in self._undone.values() if undone.returns >= UNDONE]
        for line in dict.fromkeys(undone.line for undone in known):
            of_line = [undone for undone in known if undone.line == line]
            worst = max(of_line, key=lambda undone: undone.deviation)
            at = int((worst.last.double() - worst.start).abs().argmax())
            self.session.emit(
                RoundedUse(
                    use="restored",
                    op="aten.sub_.Tensor",
                    source="" if line is None else line.source,
                    made_by="aten.add_.Tensor",
                    made_at="",
                    dtype=dtype_name(worst.last),
                    value=f"{float(worst.last[at]):.6g}",
                    exact=f"{float(worst.start[at]):.6g}",
                    changed=sum(undone.lost for undone in of_line),
                    of=sum(undone.start.numel() for undone in of_line),
                )
            )

    def _is_parameter(self, target: Tensor) -> bool:
        parameters = (tensor for _, _, tensor, _, is_buffer in self.names.tensors() if not is_buffer)
        return any(p.shape == target.shape and p.data_ptr() == target.data_ptr() for p in parameters)

    def _tell(self, line: Line | None) -> None:
        of_line = [tensor for tensor in self._judged.values() if tensor.line == line]
        stalled = [tensor for tensor in of_line if tensor.is_stalled]
        if not of_line:
            return
        if _elements(stalled) < MOSTLY * _elements(of_line):
            stalled = []  # withdraws what was written before
        self._emit(line, max(stalled or of_line, key=lambda tensor: tensor.wanted), stalled, of_line)

    def _emit(
        self, line: Line | None, worst: _Followed, stalled: Sequence[_Followed], compared: Sequence[_Followed]
    ) -> None:
        self.session.emit(
            LostWrites(
                source="" if line is None else line.source,
                dtype=worst.dtype,
                tensors=len({(tensor.held, tensor.memory) for tensor in stalled}),
                compared=len({(tensor.held, tensor.memory) for tensor in compared}),
                checks=worst.checks,
                wanted=sum(tensor.wanted for tensor in stalled),
                lost=sum(tensor.lost for tensor in stalled),
                absmax=worst.absmax,
                change=worst.change,
                in_place=worst.in_place,
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
        agree = [((self.values - values).abs() <= near).double().mean() for values in (lost.values, -lost.values)]
        return float(max(agree)) >= MOSTLY_SIMILAR


def _taken_of(tensor: Tensor) -> _Taken | None:
    """The elements of an operand by which it is compared with what was lost; None where it has none."""
    if not tensor.is_floating_point() or not measurable(tensor) or not tensor.is_contiguous():
        return None
    values = tensor.detach().reshape(-1)[:: -(-tensor.numel() // SAMPLED)][:COMPARED].double()
    return _Taken(values, float(values.abs().sum()))


def _sampled(args: Sequence[Any], kwargs: dict[str, Any], target: Tensor, stride: int) -> list[Any] | None:
    """The parts of operands that belong to the elements of ``target`` that are compared, in float64; None where one has no such part."""
    if not target.is_contiguous() or any(isinstance(value, Tensor) for value in kwargs.values()):
        return None
    parts = [_part_of(value, target, stride) if isinstance(value, Tensor) else value for value in args]
    return None if any(part is None for part in parts) else parts


def _part_of(value: Tensor, target: Tensor, stride: int) -> Tensor | None:
    if measurable(value) and value.numel() == 1:
        return value.detach().double().reshape(())
    if measurable(value) and value.shape == target.shape and value.is_contiguous():
        return value.detach().reshape(-1)[::stride].double()
    return None


def _is_half(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype in HALF and value.numel() > 0 and measurable(value)


@cache
def _name(func: Any) -> str:
    return str(schema_of(func).name).removeprefix("aten::")


def _rounds(known: _Round | None) -> int:
    return -1 if known is None else known.rounds


def _elements(tensors: list[_Followed]) -> int:
    """How many elements they have: of a line, weights that begin at zero and move may be as many tensors as those that stand still."""
    return sum(tensor.elements for tensor in tensors)
