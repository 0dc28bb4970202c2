"""Shadows: small half-precision values, those of float32 where a line begins, and, beside each, what the same operators make of it in float64, compared where a value is used.

An operator that takes part in half precision is run a second time on the float64 values of its operands. A value begins as its own float64 value: data,
parameters, random numbers, what is too large. Where rounding has made the two differ, the float64 values are kept beside the *memory* of the tensor, so that
views and writes in place need nothing of their own, together with the operator whose rounding moves them most. A difference alone is no error. It is judged
where the value is used:

* a **decision** (argmax, topk, sign, a search; not sort, of which mostly the values are used) that is another one than float64 takes, although the values that it is between are further apart there
  than a few roundings of their own size: two scores that are nearly equal may swap;
* a choice among values that are **distinct** in float64 and equal here, so that their order decides;
* whole numbers, also as quotients or shares of them, that a cast or a rounding turns into **other whole numbers**, or that Python reads;
* a **step** between two entries of a grid that is 0 because they coincide;
* **factors** that have become 0 and are not small beside the others;
* the **imaginary part**, where a cast cuts it off;
* an **angle** of which a sine is taken, and that is off by a good part of a turn;
* **memory that is written in place** and becomes inf where float64 is finite: a buffer, a statistic;
* a **comparison**, by which a mask is made or a loop goes on, that has another result;
* a **schedule** that the program computes from numbers alone, and of which entries coincide;
* a **loss**, a **number** that Python reads, and what a layer is **given**, where half of the digits that the dtype has are lost.
"""

import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dtypedoctor._torch_private import base_of, memory_key, schema_of
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.instrument.frames import Line, line_of, local_of
from dtypedoctor.instrument.lifted import NUMBERS, Lifted, lifted_from
from dtypedoctor.instrument.naming import short_name
from dtypedoctor.instrument.operators import (
    Arguments,
    Uncollected,
    in_wider,
    leaves_memory_as_it_was,
    tensors_of,
    tree_map,
    written,
)
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.observer import Observer, parameters_of
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import RoundedAngles, RoundedIndices, RoundedUse

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

NARROW = {torch.float16: 11, torch.bfloat16: 8}
"""Significant bits of the dtypes whose rounding is followed; what goes through float8 begins anew."""
_BITS = {**NARROW, torch.float32: 24}
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
SMALL = 1 << 20
"""Elements of a memory beside which float64 values are kept."""
OPERANDS = 1 << 21
"""Elements of all operands of an operator that become float64, up to which it is run so."""
HELD = 6 << 20
"""Elements of all float64 values together, 48 MiB; the oldest make room."""
AT_ONE_LINE, ALLOWANCE, UNIT = 256, 20_000, 1 << 14
"""Calls of an operator at one line that are run in float64, and of all; each takes about 0.15 ms on a CPU, and as much for so many elements."""
AT_ONE_LINE_IN_FLOAT32, ALLOWANCE_IN_FLOAT32, SMALL_IN_FLOAT32 = 4, 1_000, 1 << 16
"""The same in float32, where one operator loses little, and two may lose all: a difference of near numbers; and elements of its results."""
SLACK = 3
"""Significant bits that are taken from float64 values before two of them count as different to a decision: 8 roundings."""
SUM, FEWEST = 64, 16
"""Elements up to which a sum is followed also where its line is run often; different numbers that are known again where they come back to torch."""
AMPLIFIED = 16
"""Times that a relative error has to grow in a difference for its numbers to be near each other."""
BY_FAR = 4
"""Times that the rounding of an operator has to move its result as far as what its operands are off by, for it to be to blame."""
RECURRENT, AT_ONE_RECURRENCE = 1 << 10, 1 << 10
"""Elements up to which a value that is computed from itself is followed for longer, and calls at one line then."""
FEW_CHOSEN = 64
"""Choices of a row that are compared as a set."""
_OF_DATA = 20
"""Bits of a difference below which the rounding of data in float32 makes it, where half precision is compared with it."""
_OF_COPIES = 16
"""Bits of a difference below which its terms may be the same numbers, computed in two ways with some hundred roundings of float32."""
CANCELLED = 3
"""Differences of two near numbers at one line from which on they are more than a coincidence."""
COMPARED = 1 << 22
LARGEST_PRODUCT = 1 << 24
"""Multiplications of a product of two tensors that is run in float64."""
GRID = 16
"""Entries of a schedule."""
STEADY, STANDING = 1 / 8, 1 / 3
"""Shares of the steps between numbers that Python reads one after another: in which a schedule turns at most; and from which on it stands still too often."""
_LIFTED = "torch.tensor"
"""What is said to have made a tensor of Python's numbers."""
MOST_LINES = 100
"""Lines whose uses are told of."""

_SEARCHES = frozenset({"searchsorted", "bucketize"})
_CHOICES = frozenset({"argmax", "argmin", "max", "min", "topk", "kthvalue", "median", "cummax", "cummin"})
_CONTRACTIONS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "addmv", "convolution", "linear", "matmul"})
"""Products. What a network makes differs from float64 by the rounding of all its layers, and what is chosen among its scores may, too: values begin anew at products with weights."""
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_DIFFERENCES = frozenset({"add", "sub", "rsub", "add_", "sub_"})
_COPIES = frozenset({"_to_copy", "clone", "copy_", "cat", "stack", "flip", "index", "index_select"})
_LOOKUPS = frozenset(
    {
        "index",
        "index_select",
        "index_add",
        "index_put",
        "index_copy",
        "embedding",
        "_embedding_bag",
        "gather",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "bincount",
        "_unique2",
        "unique_dim",
        "take",
    }
)
_OF_WHOLE = frozenset({"_to_copy", "clamp", "clamp_min", "clamp_max"})
_PERIODIC = frozenset({"remainder", "fmod"})
_FACTORIZATIONS = frozenset({"_linalg_svd", "_linalg_eigh", "linalg_eig"})
"""Of their vectors those that are equally long may turn, and each may be the opposite one: only the values are compared."""
_SINES = frozenset({"sin", "cos"})
_ROOTS = frozenset({"sqrt", "rsqrt"})
_DRAWN = "aten.rand.default"
_DRAWS = frozenset({"rand", "rand_like", "uniform_"})
NOISE, CHANCE = 4 * torch.finfo(torch.float32).eps, 1e-3
"""What whole numbers may be off after divisions and products in float32; and how likely other numbers may be as near."""
RADIANS = 0.25
"""Errors of an angle from here on matter."""
_ADDS = frozenset({"add", "add_"})
_SIGNS = frozenset({"sign", "sign_", "sgn", "sgn_"})


@dataclass(frozen=True, slots=True)
class Origin:
    """The operator whose rounding makes up most of what a value is off by.

    Attributes:
        whole: whether whole numbers went into it.
        sums: whether more numbers went into it than came out: it has counted.
        largest, apart: of what it has rounded the largest magnitude, and the largest difference from the float64 values.
        cancels: whether it is a difference of near numbers, which float32 has rounded before.
    """

    op: str
    line: Line | None
    dtype: torch.dtype
    whole: bool
    largest: float = 0.0
    apart: float = 0.0
    sums: bool = False
    cancels: bool = False

    @property
    def is_lossy(self) -> bool:
        """Whether it loses more than each operator in float32 does: numbers that are put into float32 are followed only if they have more digits."""
        return self.dtype in NARROW or self.op in (_LIFTED, "aten._to_copy.default")

    @property
    def is_fine(self) -> bool:
        """Whether it has rounded fractions in float32."""
        return self.dtype is torch.float32 and not (self.whole or self.is_lossy)

    @property
    def source(self) -> str:
        """The line as text; empty where it is not known."""
        return "" if self.line is None else self.line.source


@dataclass(slots=True)
class _Memory(Uncollected):
    """What all elements of a storage would be in float64, and what they were when that was computed.

    Attributes:
        origin: the operator to blame for the difference.
        overflowed: whether inf or NaN has led to it.
        is_number: whether it is what Python's numbers were before a tensor was made of them.
        terms: of what a difference of near numbers has led to, how much the largest of these is rounded by; None of all else.
    """

    held: StorageWeakRef
    exact: Tensor
    now: Tensor
    origin: Origin
    overflowed: bool = False
    is_number: bool = False
    terms: float | None = None


@dataclass(slots=True)
class _Total:
    """Squares of the errors and of the float64 values of all that a line has used, with the worst of them, and how often it has used something, and lost that."""

    use: RoundedUse
    errors: float = 0.0
    squares: float = 0.0
    worst: tuple[bool, float] = (False, 0.0)
    uses: int = 0
    lost: int = 0
    first_lost: RoundedUse | None = None


@dataclass(slots=True)
class _Series:
    """Numbers that a line hands to Python one after another: a schedule over the steps, a loss that a scheduler of learning rates is told.

    Attributes:
        last: the latest, and what it would be in float64.
        steps: from one to the next; in ``turns`` of them float64 goes the other way than before, in ``equal`` the two are one number, and differ in float64.
        origin: of the rounding; ``shown`` the first two that are equal, as their float64 values.
    """

    last: tuple[float, float]
    steps: int = 0
    turns: int = 0
    equal: int = 0
    rises: bool | None = None
    origin: Origin | None = None
    shown: tuple[float, float] = (0.0, 0.0)

    def add(self, now: float, exact: float, origin: Origin | None) -> None:
        """Adds a number."""
        before, was = self.last
        self.last, self.origin = (now, exact), self.origin or origin
        if exact == was:
            return
        self.steps += 1
        self.turns += self.rises is not None and self.rises != (exact > was)
        self.rises = exact > was
        if now == before:
            self.shown = self.shown if self.equal else (was, exact)
            self.equal += 1

    @property
    def stands_still(self) -> bool:
        """Whether it goes on steadily in float64, and in half precision often does not."""
        return self.steps >= GRID and self.turns <= STEADY * self.steps and self.equal >= STANDING * self.steps


@dataclass(frozen=True)
class _Call:
    """One operator call, beside what it makes in float64.

    Attributes:
        operands: its tensors as they were, by the tensors that hold them now.
        known: what is known of the memory of an operand, by the identity of the operand as it was.
        values: the float64 values of the operands of floating point, likewise.
    """

    func: Any
    arguments: Arguments
    operands: list[tuple[Tensor, Tensor]]
    known: dict[int, _Memory]
    values: dict[int, Tensor]
    results: Sequence[Tensor]
    exact: Sequence[Tensor]
    line: Line | None

    @property
    def name(self) -> str:
        """Without namespace and overload."""
        return _name(self.func)

    def argument(self, name: str) -> Any:
        """The argument of this name, or its default."""
        args, kwargs = self.arguments
        for position, argument in enumerate(schema_of(self.func).arguments):
            if argument.name == name:
                given = args[position] if position < len(args) else kwargs.get(name)
                return argument.default_value if given is None else given
        return None

    def is_beyond(self, operand: Tensor) -> bool:
        """Whether an operand is not finite in float64 either, where that is known, or has overflowed."""
        memory = self.known.get(id(operand))
        if memory is not None and memory.overflowed:
            return True
        return not bool((operand if memory is None else self.values[id(operand)]).isfinite().all())

    @cached_property
    def origin(self) -> Origin:
        """The operator to blame for what the result is off by: the one whose rounding moves it most.

        Each operand is made exact by itself, and so is this operator alone, on the operands as they are. What rounds first stays the origin unless
        another rounding moves the result several times as far: of a cast and a product with the same spacing the cast is to blame.
        """
        known = [(copy, self.known[id(copy)]) for copy, _ in self.operands if id(copy) in self.known]
        if not known:
            return self._own_origin()
        # All operators of float32 round alike: what has led to a difference of near numbers, or to a product whose terms cancel, is not to blame, but
        # the formula that takes it; unless half of the digits were lost before.
        is_precise = self._before <= digits_lost("float32")
        if self._grows and is_precise and all(memory.origin.is_fine for _, memory in known):
            return replace(self._own_origin(), cancels=True)
        shares = self._shares([copy for copy, _ in known])
        most = max(range(len(known)), key=lambda number: shares[1 + number])
        if shares[0] > BY_FAR * shares[1 + most]:
            return self._own_origin()
        return known[most][1].origin

    def _shares(self, rounded: list[Tensor]) -> list[float]:
        """How far the result is moved by what this operator rounds, and by what each of these operands is off by, in the Euclidean norm."""
        real = self.results[0]
        if not real.is_floating_point():  # a comparison, a choice: of values in the same unit
            off = [_distance(copy.double(), self.values[id(copy)]) for copy in rounded]
            return [self.narrowed, *off]
        if len(rounded) == 1 and real.dtype not in NARROW and self.known[id(rounded[0])].origin.is_lossy:
            return [0.0, 1.0]
        alone = self.in_float64(exact=())
        off = [_distance(alone, self.in_float64(exact=(copy,))) for copy in rounded]
        overflows = bool((~real.isfinite() & alone.isfinite()).any())
        return [math.inf if overflows else _distance(real.double(), alone), *off]

    @cached_property
    def narrowed(self) -> float:
        """How far a comparison moves what it compares: a single number takes the dtype of a tensor in half precision."""
        if self.name not in _COMPARISONS:
            return 0.0
        sides = [side if isinstance(side, Tensor) else torch.tensor(side, dtype=torch.float64) for side in self.sides]
        return max((_distance(side.to(self.common).double(), side.double()) for side in sides), default=0.0)

    @property
    def sides(self) -> Sequence[Any]:
        """What a comparison compares."""
        return self.arguments[0][:2]

    @property
    def common(self) -> torch.dtype:
        """The dtype in which it does."""
        return torch.result_type(*self.sides)

    def in_float64(self, exact: Sequence[Tensor]) -> Tensor:
        """The first result in float64, of the operands as they are but for those that are made exact."""
        made_exact = {id(copy): self.values[id(copy)].clone() for copy in exact}
        as_they_are = {id(copy): copy.detach().double() for copy, _ in self.operands if copy.is_floating_point()}
        results = in_wider(self.func, self.arguments, torch.float64, _FLOATS, {**as_they_are, **made_exact})
        return results[0] if results else self.exact[0]

    @property
    def terms(self) -> float | None:
        """Of a difference of near numbers, or what is computed from one, how much the largest of these is rounded by; 0 where they are copies; None of all else."""
        if self._cancels:
            return self._terms_of_difference()
        return max((m.terms for m in self.known.values() if m.terms is not None), default=None)

    @cached_property
    def _cancels(self) -> bool:
        """Whether it is a difference of near numbers."""
        return self.name in _DIFFERENCES and self._grows

    @cached_property
    def _grows(self) -> bool:
        """Whether the result of additions is off by much more than what is added, beside itself."""
        adds = self.name in _DIFFERENCES or self.name in _CONTRACTIONS
        return adds and _relative(self.results[0], self.exact[0]) > AMPLIFIED * self._before > 0

    @cached_property
    def _before(self) -> float:
        """How far the operands are off, beside themselves."""
        rounded = [copy for copy, _ in self.operands if id(copy) in self.known]
        return max((_relative(copy, self.values[id(copy)]) for copy in rounded), default=0.0)

    def _own_origin(self) -> Origin:
        tensors, real, exact = [copy for copy, _ in self.operands], self.results[0], self.exact[0]
        whole = all(map(_is_whole, tensors)) if tensors else self.name == "arange"
        sums = any(tensor.numel() > real.numel() for tensor in tensors)
        dtype = self.common if self.name in _COMPARISONS else real.dtype
        origin = Origin(str(self.func), self.line, dtype, whole, sums=sums)
        if not whole or not real.numel():
            return origin
        off = (real.double() - exact).abs()[real.isfinite()]
        apart, largest = (float(t.max()) if t.numel() else 0.0 for t in (off, real.double().abs()[real.isfinite()]))
        return replace(origin, largest=largest, apart=apart)

    def _terms_of_difference(self) -> float:
        """What the terms of a difference are rounded by, where it is more than float32 makes of two copies of the same numbers."""
        terms = [self.values[id(copy)] for copy, _ in self.operands if id(copy) in self.values]
        if self.name not in _DIFFERENCES or len(terms) != 2 or not self.exact[0].numel():
            return 0.0
        size, left = float(torch.stack([term.abs().max() for term in terms]).max()), float(self.exact[0].abs().max())
        rounding = size * 2.0 ** -self._fewest_bits()
        return rounding if math.isfinite(rounding) and left > size * 2.0**-_OF_COPIES else 0.0

    def _fewest_bits(self) -> int:
        """Significant bits of the narrowest dtype that the result and its operands have been rounded to."""
        dtypes = {self.results[0].dtype} | {memory.origin.dtype for memory in self.known.values()}
        return min(_BITS.get(dtype, 24) for dtype in dtypes)


class Shadows(Observer):
    """Writes a :class:`RoundedUse` or :class:`RoundedIndices` where rounding changes what a program does."""

    priority = 10

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        session = checks.session
        self._looking = session.guard.keeping("values that half precision rounds")
        self._reads = session.readings.reads
        self._memories: OrderedDict[int, _Memory] = OrderedDict()
        self._elements, self._most = 0, FEWEST
        self._operators: Counter[bool] = Counter()
        self._at_line: Counter[tuple[Any, Line | None]] = Counter()
        self._uses: dict[tuple[str, str, str], RoundedUse] = {}
        self._worst: Counter[tuple[str, str, str]] = Counter()
        """Most results that have differed in one call of a line."""
        self._made: dict[int, StorageWeakRef] = {}
        self._first_ones = ALLOWANCE_IN_FLOAT32
        """Operators in float32 that are still followed."""
        self._generated: dict[int, StorageWeakRef] = {}
        """Memories of what was computed from numbers alone: schedules, grids, tables."""
        self._copied: dict[int, _Memory] = {}
        """Of copies of a schedule (stacked, repeated, with the axes of a mesh) what is known of it."""
        self._weights: dict[int, StorageWeakRef] = {}
        """Memories of casts and copies of weights."""
        self._scalars: dict[int, StorageWeakRef] = {}
        """Memories of single numbers in half precision that are computed from Python's numbers alone."""
        self._series: dict[Line | None, _Series] = {}
        self._scheduled: dict[Line | None, bool] = {}
        """Whether a line has a scheduler of learning rates read numbers."""
        self._numbers: dict[float, tuple[float, Origin]] = {}
        """Float64 values of numbers that have left torch, and where they were rounded."""
        self._ids: dict[int, tuple[StorageWeakRef, Callable[[], None]]] = {}
        """Memories of whole numbers, and what there is to tell if something is looked up by them."""
        self._floors: dict[int, tuple[StorageWeakRef, int]] = {}
        """Memories of whole numbers that were made of others, and the memory of those."""
        self._met: dict[int, StorageWeakRef] = {}
        """Memories of which it is known whether they hold such numbers."""
        self.noticed: Callable[[], None] = lambda: None
        """Called where a value is followed that may leave torch."""
        self._narrow: dict[int, StorageWeakRef] = {}
        """Memories in half precision that operators of this process have made."""
        self._digits = torch.Generator().manual_seed(0)
        self.gradients: set[int] = set()
        """Memories that custom functions have written in the backward pass that is running."""
        self._totals: dict[tuple[str, str, str], _Total] = {}
        self._first: dict[tuple[str, str, str], tuple[int, int, str]] = {}
        """Step, call and phase in which a use was met first: what is told at the end is told of then."""
        self._cancelled: Counter[Line | None] = Counter()

    def saw(self, seen: Seen) -> None:
        """An operator has run inside of a module that is looked at."""
        if _name(seen.func) == "lift_fresh":
            with self._looking, self.position.aside():
                made = lifted_from(seen.operands[0])
            for lifted in self.checks.hearing("lifted") if made is not None else ():
                lifted(made)
        if _name(seen.func) == "_local_scalar_dense":
            self.read(seen.operands[0], line_of(sys._getframe()))
            return
        results = seen.results or written(seen.func, seen.given)
        self._follow_drawn(seen.func, seen.given, results)
        if not self._takes_part(seen.func, tensors_of(seen.given), results):
            return
        if not self._is_turn(seen.func, tensors_of(seen.given), results, line := line_of(sys._getframe())):
            return
        overwritten = {_key(tensor) for tensor in written(seen.func, seen.given)}
        is_state = not overwritten <= self._made.keys()
        if is_state:  # what is in memory that the call has not made depends on all calls
            self.checks.look.accumulating = [self.saw]
        self._ran(seen.func, seen.arguments, seen.given, results, line, is_state=is_state)
        self._notice(results[0])
        self._made.update((_key(tensor), StorageWeakRef(tensor.untyped_storage())) for tensor in results)

    def look_ended(self) -> None:
        """The call that was looked at is over; its values may be used later."""
        self._made.clear()

    def read(self, tensor: Tensor, line: Line | None) -> None:
        """Python has read a number: a count in half precision is another one."""
        self._add_to_series(tensor, line)
        if not self._memories or _key(tensor) not in self._memories:
            return
        with self._looking, self.position.aside():
            memory = self._memory_of(tensor, tensor)
            if memory is not None:
                self._number_read(memory, tensor, _view(memory.exact, tensor), line)

    def _add_to_series(self, tensor: Tensor, line: Line | None) -> None:
        """Follows a number that is computed from numbers alone, or that a scheduler reads, through the steps of the program."""
        if not self._is_of_series(tensor, line):
            return
        with self._looking, self.position.aside():
            memory = self._memory_of(tensor, tensor)
            now = float(tensor)
            exact = now if memory is None else float(_view(memory.exact, tensor))
            series = self._series.get(line)
            if series is not None:
                series.add(now, exact, None if memory is None else memory.origin)
            elif len(self._series) < MOST_LINES:
                self._series[line] = _Series((now, exact))
                self._met_first(("series", "aten._local_scalar_dense.default", "" if line is None else line.source))

    def _is_of_series(self, tensor: Tensor, line: Line | None) -> bool:
        is_rounded = tensor.dtype in NARROW or _key(tensor) in self._memories
        return is_rounded and (_is_held(self._scalars, tensor) or self._is_scheduled(line))

    def _is_scheduled(self, line: Line | None) -> bool:
        """Whether it is a scheduler of learning rates that reads a number."""
        if line not in self._scheduled and len(self._scheduled) < NUMBERS:
            frame: FrameType | None = sys._getframe()
            while frame is not None and str(frame.f_globals.get("__name__")).startswith(("dtypedoctor.", "torch._")):
                frame = frame.f_back
            first = frame.f_code.co_varnames[:1] if frame is not None else ()
            self._scheduled[line] = frame is not None and any(
                isinstance(local_of(frame, name), LRScheduler) for name in first
            )
        return self._scheduled.get(line, False)

    def _tell_series(self) -> None:
        for line, series in self._series.items():
            if series.stands_still and series.origin is not None:
                source, (value, exact) = "" if line is None else line.source, series.shown
                op = "aten._local_scalar_dense.default"
                told = RoundedUse(
                    use="series",
                    op=op,
                    source=source,
                    made_by=series.origin.op,
                    made_at=series.origin.source,
                    dtype=short_name(series.origin.dtype),
                    value=f"{value:.6g}",
                    exact=f"{exact:.6g}",
                    changed=series.equal,
                    of=series.steps,
                )
                self._tell((told.use, op, source), told)

    def _number_read(self, memory: _Memory, tensor: Tensor, exact: Tensor, line: Line | None) -> None:
        if bool(tensor.isfinite()) and bool(exact.isfinite()):
            self._judge_schedule(memory, "aten._local_scalar_dense.default", line)
            if memory.origin.dtype in NARROW and memory.origin.whole and memory.origin.sums and _is_whole(exact):
                self._counted(memory.origin, line, tensor.long(), exact.long(), tensor != exact)
            else:
                self._lost("number", memory, tensor, exact, "", line)
            self._left_torch(memory, tensor, exact)

    def left(self, tensor: Tensor) -> None:
        """A tensor leaves torch, for a list, for numpy or to be printed; what is made of its numbers may come back."""
        if self.position.muted or not self._memories or _key(tensor) not in self._memories:
            return
        with self._looking, self.position.aside():
            memory = self._memory_of(tensor, tensor)
            if memory is not None:
                line, exact = line_of(sys._getframe()), _view(memory.exact, tensor)
                self._judge_schedule(memory, "aten._local_scalar_dense.default", line)
                self._lost("number", memory, tensor, exact, "", line)
                self._left_torch(memory, tensor, exact)

    def _left_torch(self, memory: _Memory, tensor: Tensor, exact: Tensor) -> None:
        if tensor.numel() <= NUMBERS - len(self._numbers) and memory.origin.dtype in NARROW:
            pairs = zip(tensor.flatten().tolist(), exact.flatten().tolist(), strict=True)
            self._numbers.update((now, (right, memory.origin)) for now, right in pairs)

    def _come_back(self, tensors: Sequence[Tensor], line: Line | None) -> None:
        """Follows tensors that hold nothing but numbers which have left torch, as far as is known at the first operator on them."""
        for tensor in tensors:
            key = _key(tensor)
            if key in self._memories or _is_held(self._met, tensor) or not _is_plain(tensor):
                continue
            storage = tensor.untyped_storage()
            self._met[key] = StorageWeakRef(storage)
            if tensor.device.type != "cpu" or tensor.is_complex() or storage.nbytes() > NUMBERS * tensor.element_size():
                continue
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            known = [self._numbers.get(number) for number in whole.tolist()]
            if None in known or len(set(known)) < FEWEST:
                continue
            exact = torch.tensor([number[0] for number in known if number], dtype=torch.float64)
            origin = next(number[1] for number in known if number)
            if _is_integer(tensor) and origin.whole:
                self._counted(origin, line, whole, exact.long(), whole != exact)
            elif tensor.is_floating_point():
                self._begin(tensor, exact, origin)

    def _begin(self, tensor: Tensor, exact: Tensor, origin: Origin) -> None:
        """Begins to follow a tensor that is rounded already."""
        now, held = tensor.detach().flatten().clone(), StorageWeakRef(tensor.untyped_storage())
        self._memories[_key(tensor)] = _Memory(held, exact, now, origin, is_number=origin.op == _LIFTED)
        self._elements += exact.numel()

    def lifted(self, made: Lifted) -> None:
        """Python's numbers have been put into a tensor: in half precision as others, and in float32 where they have more digits than it has before the point."""
        if made.tensor.device.type != "cpu":
            return
        with self._looking, self.position.aside():
            if made.tensor.numel() == 1 and made.tensor.dtype in NARROW:
                self._scalars.update(_small_memories([made.tensor]))
            if not torch.equal(made.exact, made.tensor.double()):
                origin = Origin(_LIFTED, made.line, made.tensor.dtype, _is_whole(made.exact))
                self._begin(made.tensor, made.exact.flatten(), origin)

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins: of a loss that has lost its digits the gradients have, too."""
        if not self.position.backward_depth:
            self.take(tensors, "loss")

    def after_backward(self) -> None:
        """It has ended."""
        self.gradients.clear()

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer takes the gradients that the program has changed since the backward pass, or in hooks."""
        self.take(
            [p.grad for p in parameters_of(optimizer) if p.grad is not None] if self._memories else [], "gradient"
        )

    def take(self, tensors: Sequence[Tensor], use: str) -> None:
        """Values are used as they are."""
        if not self._memories:
            return
        with self._looking, self.position.aside():
            for tensor in tensors:
                memory = self._memory_of(tensor, tensor) if measurable(tensor) else None
                if memory is not None:
                    self._lost(use, memory, tensor, _view(memory.exact, tensor), "", None)

    def ran_outside(
        self, func: Any, kept: Arguments, given: Arguments, results: Sequence[Tensor], line: Line | None
    ) -> None:
        """An operator has run outside of modules.

        Args:
            func: the operator.
            kept: what it was given, with copies of what it has written to since.
            given: the same without copies.
            results: what it returned, or has written to.
            line: the line that called it.
        """
        operands = tensors_of(given)
        self._follow_drawn(func, given, results)
        if self._takes_part(func, operands, results) and self._is_turn(func, operands, results, line):
            with self._looking, self.position.aside():
                self._ran(func, kept, given, results, line)
            self._notice(results[0])

    def _notice(self, result: Tensor) -> None:
        """Says that a result is followed which may be read as a whole. What a network computes goes on to be differentiated, unless little of it is right."""
        memory = self._memories.get(_key(result)) if self._memories else None
        # of float32 alone, which each operator rounds, nothing is followed out of torch
        if (
            memory is not None
            and memory.origin.is_lossy
            and (
                not result.requires_grad
                or _relative(memory.now, memory.exact) > digits_lost(short_name(memory.origin.dtype))
            )
        ):
            self.noticed()

    def stop(self) -> None:
        """The program is over: tells what the uses have come to."""
        for key, use in self._uses.items():
            if use.changed > 0:
                self._tell(key, use)
        self._tell_series()
        for key, total in self._totals.items():
            least = digits_lost(total.use.dtype)
            if total.use.use == "number" and not total.use.is_off(2**SLACK):  # which is a note, mostly
                least = math.sqrt(least)
            if total.errors > least**2 * total.squares:
                self._tell(key, total.use)
            elif total.first_lost and total.lost > max(FEWEST, total.uses / 2):
                shown = total.first_lost
                self._tell(key, replace(total.use, value=shown.value, exact=shown.exact))
        self._uses.clear()
        self._totals.clear()
        self._memories.clear()

    def _tell(self, key: tuple[str, str, str], use: RoundedUse) -> None:
        step, call, phase = self._first[key]
        self.session.emit(use, phase=phase, at=(step, call))

    def _met_first(self, key: tuple[str, str, str]) -> None:
        self._first[key] = self.position.moment

    def _takes_part(self, func: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        """Whether an operator computes with small values in half precision, or with what was made of them; in float32 where a choice is to be expected."""
        tensors = (*operands, *results)
        if _name(func) == "multinomial":
            self._judge_draw(str(func), operands[0], results[0])
            return False
        if self._floors and results and operands and _name(func) in _OF_WHOLE:
            self._follow_whole(results[0], self._whole_of(operands[0]))
        if self._ids and results:
            self._look_up(func, operands, results)
        if self._numbers:
            with self._looking, self.position.aside():
                self._come_back(operands, line_of(sys._getframe()))
                self._met.update((_key(tensor), StorageWeakRef(tensor.untyped_storage())) for tensor in results)
        if results:
            self._note_source(func, operands, results)
            if results[0].numel() == 1 and has_wide_form(func):
                self._note_scalar(operands, results[0])
            self._note_made(func, operands, results)
        is_float32 = self._first_ones > 0 and bool(results) and _are_float32(operands, results)
        if not (is_float32 or _may_round(func, tensors)) and self._memories.keys().isdisjoint(
            map(_key, operands) if self._memories else ()
        ):
            return False
        if not results or not has_wide_form(func) or not all(map(_is_plain, tensors)):
            return False
        if not _are_small(operands, results) or not self._reads(results[0]):
            return False
        if _name(func) in _CONTRACTIONS and not all(_is_whole(t.flatten()[:8]) and _is_whole(t) for t in operands):
            weights = [self._is_weight(tensor) for tensor in operands]
            if any(weights):
                self._enters_layer(func, operands)
                return False
            return results[0].numel() * operands[-1].shape[0] <= LARGEST_PRODUCT
        return True

    def _judge_draw(self, op: str, weights: Tensor, drawn: Tensor) -> None:
        """Draws of what has the probability 0, or that never draw what has one in float64: more in all than the sum is rounded by."""
        if not measurable(weights) or not self._reads(weights):
            return
        with self._looking, self.position.aside():
            memory, line = self._memory_of(weights, weights), line_of(sys._getframe())
            origin = Origin(op, line, weights.dtype, whole=False) if memory is None else memory.origin
            at = weights.gather(-1, drawn)
            changed, real, values = at == 0, at, drawn
            if memory is not None:
                exact = _view(memory.exact, weights)
                gone = (weights == 0) & (exact > 0)
                if bool((exact * gone).sum() > torch.finfo(weights.dtype).eps * exact.sum()):
                    changed, real, values = gone, weights, exact
            self._add("draw", op, line, origin, changed, real, values)

    def _note_source(self, func: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Whether results are computed from numbers alone, or are copies of weights."""
        for memories in (self._generated, self._weights, self._met, self._scalars):
            _keep_few(memories)
        for gone in self._copied.keys() - self._generated.keys():
            del self._copied[gone]
        made = _small_memories(results)
        if not made:
            return
        if _name(func) in _COPIES and any(map(self._is_weight, operands)):
            self._weights.update(made)
        self._note_generated(func, operands, results, made)

    def _note_generated(
        self, func: Any, operands: Sequence[Tensor], results: Sequence[Tensor], made: dict[int, StorageWeakRef]
    ) -> None:
        """Whether results are computed from numbers alone."""
        if self._is_of_numbers(func, operands, results):
            self._generated.update(made)
            for memory in map(self._schedule_in, operands if _name(func) in _COPIES else ()):
                self._copied.update(dict.fromkeys(made, memory) if memory is not None else {})
        elif not _is_view(func):
            for key in self._generated.keys() & made.keys():
                del self._generated[key]

    def _note_scalar(self, operands: Sequence[Tensor], result: Tensor) -> None:
        if all(_is_held(self._scalars, tensor) for tensor in operands) if operands else result.dtype in NARROW:
            self._scalars.update(_small_memories([result]))
        else:
            self._scalars.pop(_key(result), None)

    def _note_made(self, func: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """A copy of what has come in half precision still is what has come."""
        if results[0].dtype in NARROW and not (_name(func) in _COPIES and self._arrive(operands)):
            _keep_few(self._narrow)
            self._narrow.update(_small_memories(results))

    def _arrive(self, operands: Sequence[Tensor]) -> bool:
        """Whether tensors are in half precision that no operator of this process has made: they come from a file, another library or another process."""
        return all(tensor.dtype in NARROW and not _is_held(self._narrow, tensor) for tensor in operands)

    def _schedule_in(self, tensor: Tensor) -> _Memory | None:
        """What is known of the schedule that a tensor is, or is a copy of."""
        memory = self._copied.get(_key(tensor)) or self._memories.get(_key(tensor))
        is_lost = memory is not None and memory.origin.dtype in NARROW
        return memory if memory is not None and is_lost and _is_grid(memory.exact) else None

    def _is_of_numbers(self, func: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        """Whether an operator computes with nothing but numbers, and what was computed from numbers."""
        begins = bool(operands) or results[0].numel() >= GRID
        return begins and has_wide_form(func) and all(_is_number(t) or _is_held(self._generated, t) for t in operands)

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is trained, is a parameter, a view of one, or a cast."""
        base = base_of(tensor)
        root = tensor if base is None else base
        return isinstance(root, nn.Parameter) or (root.requires_grad and root.is_leaf) or _is_held(self._weights, root)

    def _enters_layer(self, func: Any, factors: Sequence[Tensor]) -> None:
        """Values are multiplied with weights, where they begin anew; both may have lost their digits."""
        for tensor in factors if self._memories else ():
            if _key(tensor) not in self._memories:
                continue
            with self._looking, self.position.aside():
                memory = self._memory_of(tensor, tensor)
                if memory is not None:
                    exact = _view(memory.exact, tensor)
                    self._lost("input", memory, tensor, exact, str(func), line_of(sys._getframe()))

    def _is_turn(self, func: Any, operands: Sequence[Tensor], results: Sequence[Tensor], line: Line | None) -> bool:
        """Whether an operator is run in float64 once more; a sum has to be followed from its first term to the last. In float32 the first calls at a line are."""
        self._at_line[func, line] += 1
        if not self._is_of_half(operands, results):
            return self._is_among_first(self._at_line[func, line], results[0].numel() <= RECURRENT)
        is_sum = _name(func) in _ADDS and results[0].numel() <= SUM
        may_run = is_sum or self._at_line[func, line] <= AT_ONE_LINE
        if not may_run and self._at_line[func, line] <= AT_ONE_RECURRENCE and results[0].numel() <= RECURRENT:
            may_run = is_sum = any(_key(t) in self._memories or _is_held(self._scalars, t) for t in operands)
        self._operators[is_sum] += may_run * (1 + results[0].numel() // UNIT)
        return may_run and self._operators[is_sum] <= ALLOWANCE

    def _is_among_first(self, calls: int, is_small: bool) -> bool:
        is_first = self._first_ones > 0 and calls <= (SUM if is_small else AT_ONE_LINE_IN_FLOAT32)
        self._first_ones -= is_first
        return is_first

    def _is_of_half(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        """Whether an operator takes part in half precision, or something is followed to it that is lost there, or in whole numbers."""
        if any(t.dtype in NARROW for t in (*operands, *results)):
            return True
        known = [self._memories[key].origin for key in map(_key, operands) if key in self._memories]
        return any(origin.dtype in NARROW or origin.whole or origin.is_lossy for origin in known)

    def _ran(
        self,
        func: Any,
        kept: Arguments,
        given: Arguments,
        results: Sequence[Tensor],
        line: Line | None,
        *,
        is_state: bool = False,
    ) -> None:
        """Runs an operator on the float64 values of its operands, judges what comes of it, and keeps it."""
        operands = list(zip(tensors_of(kept), tensors_of(given), strict=True))
        known: dict[int, _Memory] = {}
        values: dict[int, Tensor] = {}
        for copy, real in operands:
            memory = self._memory_of(real, copy)
            if memory is not None:
                known[id(copy)] = memory
                values[id(copy)] = _view(memory.exact, real).clone()
            elif copy.is_floating_point():
                values[id(copy)] = copy.detach().double()
        wide = tree_map(self._exact_number, kept) if self._numbers else kept
        overwritten = {id(tensor) for tensor in written(func, given)}
        written_to = {number: value.clone() for number, value in values.items()} if overwritten else values
        exact = in_wider(func, wide, torch.float64, _FLOATS, written_to)
        if len(exact) != len(results) or any(a.shape != b.shape for a, b in zip(exact, results, strict=True)):
            return
        returned = {id(tensor) for tensor in results}
        # running statistics are written to and not returned
        besides = [
            (real, copy)
            for copy, real in operands
            if id(real) in overwritten - returned and id(copy) in values and not _equal(real, copy)
        ]
        results, exact = (
            [*results, *(real for real, _ in besides)],
            [*exact, *(written_to[id(copy)] for _, copy in besides)],
        )
        if _name(func) in _FACTORIZATIONS:
            exact = [real.double() if real.dim() > 1 else one for real, one in zip(results, exact, strict=True)]
        exact = [
            self._without_vanished(func, operands, values, pair, line) for pair in zip(results, exact, strict=True)
        ]
        call = _Call(func, kept, operands, known, values, results, exact, line)
        self._judge_real_part(call)
        if not known and self._arrive(tensors_of(given)) and _rounds(call):
            self._keep_arrived(call)
        if known and _rounds(call):
            self._judge_cast(call)
            self._follow_whole(results[0], _key(operands[0][1]))
            return  # what is whole now has been judged, and begins anew
        if known or call.narrowed:
            self._judge(call)
        if is_state:
            self._judge_state(call, overwritten)
        for real, other in zip(results, exact, strict=True):
            if real.is_floating_point():
                self._keep(call, real, other, in_place=id(real) in overwritten)

    def _follow_drawn(self, func: Any, given: Arguments, results: Sequence[Tensor]) -> None:
        """Follows uniform random numbers as they were before half precision rounded them."""
        if _name(func) not in _DRAWS or results[0].dtype not in NARROW or not _small_memories(results):
            return
        with self._looking, self.position.aside():
            # arguments that are as by default are left out
            ends = (*given[0][1:], *(0.0, 1.0)[len(given[0]) - 1 :]) if _name(func) == "uniform_" else (0.0, 1.0)
            exact = _before_rounding(results[0].detach(), ends, self._digits)
            origin = Origin(_DRAWN, line_of(sys._getframe()), results[0].dtype, whole=False)
            self._begin(results[0], exact.flatten(), origin)

    def _exact_number(self, value: Any) -> Any:
        """What a number that Python has read would be in float64."""
        return self._numbers[value][0] if type(value) is float and value in self._numbers else value

    def _without_vanished(
        self,
        func: Any,
        operands: list[tuple[Tensor, Tensor]],
        values: dict[int, Tensor],
        pair: tuple[Tensor, Tensor],
        line: Line | None,
    ) -> Tensor:
        """The float64 result with the real one where a sum of terms of both signs leaves nothing that says more than what the terms themselves are off by.

        What Kahan's sum keeps is 0 in float64. Two terms, or two numbers, may be near each other by chance.
        """
        real, exact = pair
        terms = [values.get(id(copy)) for copy, _ in operands]
        if real.dtype not in _BITS or real.is_complex() or None in [t if t is None else 0 for t in terms]:
            return exact
        name = _name(func)
        if name in _DIFFERENCES and len(terms) == 2 and len({t.shape for t in terms if t is not None}) == 1:
            size = terms[0].abs() + terms[1].abs()  # type: ignore[union-attr]
            least = size * 2.0 ** -_bits_of_difference([copy for copy, _ in operands])
            if real.numel() == 1 and bool(exact.abs() < size / 16) and bool(size > 0):
                self._cancelled[line] += 1
                if self._cancelled[line] < CANCELLED:
                    return real.double()
            return torch.where(exact.abs() <= least, real.double(), exact)
        if name in ("sum", "mean") and terms and terms[0] is not None and terms[0].numel() > real.numel() > 0:
            few = real.numel() / terms[0].numel()
            size = float(terms[0].abs().sum()) / real.numel() * (few if name == "mean" else 1)
            near = (real.double() - exact).abs() <= digits_lost(short_name(real.dtype)) * size
            mixed = exact.abs() < size / 16
            return torch.where(near & mixed, real.double(), exact)
        return exact

    def exact(self, tensor: Tensor) -> Tensor | None:
        """The float64 values of a tensor; None where they are what it holds, or are not known."""
        memory = self._memory_of(tensor, tensor)
        return None if memory is None else _view(memory.exact, tensor)

    def _memory_of(self, real: Tensor, copy: Tensor) -> _Memory | None:
        """What is known of the memory of an operand, which was ``copy``, unless somebody has written to it unseen."""
        memory = self._memories.get(_key(real)) if self._memories else None
        if memory is None:
            return None
        if not memory.held.expired() and memory.now.dtype is real.dtype and _equal(_view(memory.now, real), copy):
            return memory
        self._forget(_key(real))
        return None

    def _keep(self, call: _Call, real: Tensor, exact: Tensor, *, in_place: bool) -> None:
        """Keeps the float64 values beside the memory of a result, where they are not those that it holds."""
        key, storage = _key(real), real.untyped_storage()
        before = self._memories.get(key)
        if before is None and torch.equal(real.detach().double(), exact):
            return
        whole = torch.empty(0, dtype=real.dtype, device=real.device).set_(storage)
        if whole.numel() > SMALL:
            return
        goes_on = in_place and before is not None and before.exact.numel() == whole.numel()
        wide = whole.double()
        values = before.exact if goes_on and before is not None else wide.clone()
        _view(values, real).copy_(exact)
        self._forget(key)
        error = float((values - wide).abs().max())
        if not error or (not math.isfinite(error) and bool((wide.isfinite() & ~values.isfinite()).any())):
            return  # nothing is lost; or what float64 makes is no better
        # what float64 makes would fit, had it not been lost before: 1 / 1e-6 where a norm has become 0
        fits = torch.finfo(real.dtype).max
        overflowed = bool((~wide.isfinite() & values.isfinite() & (values.abs() > fits)).any()) or any(
            m.overflowed for m in call.known.values()
        )
        self._memories[key] = _Memory(
            StorageWeakRef(storage), values, whole.clone(), call.origin, overflowed, terms=call.terms
        )
        if self.position.backward_depth:
            self.gradients.add(key)
        self._elements += values.numel()
        if self._elements > HELD or len(self._memories) > self._most:
            for gone in [number for number, memory in self._memories.items() if memory.held.expired()]:
                self._forget(gone)
            self._most = max(FEWEST, 2 * len(self._memories))
        while self._elements > HELD and self._memories:
            self._forget(next(iter(self._memories)))

    def _forget(self, key: int) -> None:
        memory = self._memories.pop(key, None)
        self._elements -= memory.exact.numel() if memory is not None else 0

    def _judge(self, call: _Call) -> None:
        """Judges an operator that uses values which rounding has changed; in float32 only choices, and roots."""
        self._judge_root(call)
        if call.origin.dtype is torch.float32:
            self._judge_choice(call)
            if call.origin.whole:
                self._judge_step(call)
            return
        if call.name not in _COPIES - _LOOKUPS and call.name not in _COMPARISONS:
            used = call.operands[: 1 if call.name in ("div", "div_") else None]  # a mean divides by a count
            for memory in [call.known[id(copy)] for copy, _ in used if id(copy) in call.known]:
                if not (
                    memory.origin.whole and call.name in _DIFFERENCES
                ):  # whole numbers that are counted from elsewhere
                    self._judge_schedule(memory, str(call.func), call.line)
        if call.name in _COMPARISONS:
            self._judge_comparison(call)
        self._judge_fraction(call)
        if call.name in _SINES and not call.operands[0][1].requires_grad:  # else it is an activation
            self._judge_angles(call)
        self._judge_step(call)
        self._judge_factor(call)
        if call.name in _SIGNS:
            self._used("decision", call, call.results[0].double() != call.exact[0], call.results[0], call.exact[0])
        elif call.name in _SEARCHES:
            real, exact = call.results[0], call.exact[0]
            self._used("decision", call, (real - exact).abs() > 1, real, exact)
            self._keep_numbers(call, real, exact)
        else:
            self._judge_choice(call)

    def _judge_choice(self, call: _Call) -> None:
        """Indices of the largest or smallest values, or of their order."""
        chosen = next((number for number, tensor in enumerate(call.results) if _is_integer(tensor)), None)
        if chosen is not None and call.name in _CHOICES:
            real, exact = call.results[chosen], call.exact[chosen]
            near, far = _chooses_otherwise(call, real, exact)
            self._used("decision", call, far, real, exact, _beside(far, exact))
            if call.origin.dtype in NARROW:
                self._used("choice", call, near, real, exact)
            # Chosen by the order of values that are equal only here; each of them is as near to its float64 value as the dtype allows, or its
            # spacing is not why. Of several the set counts, so that of a whole order nothing does.
            scores, dim = call.operands[0][0], call.argument("dim")
            if dim is None:
                return
            values = call.values[id(scores)]
            at, other = (index if index.dim() == scores.dim() else index.unsqueeze(dim) for index in (real, exact))
            if at.size(dim) > 1 and call.origin.dtype not in NARROW:
                return  # what a mask of -1e9 has made equal in float32 is chosen last
            picked, wanted = (values.gather(dim, index).sort(dim).values for index in (at, other))
            here, there = (scores.gather(dim, index).sort(dim).values for index in (at, other))
            is_tie = (here == there) & (picked.to(scores.dtype) == here) & (wanted.to(scores.dtype) == here)
            is_tie &= here.isfinite() & (picked != wanted)  # what is inf has lost more than its last bits
            self._used("tie", call, is_tie, at, other)

    def _judge_root(self, call: _Call) -> None:
        """Roots of differences of near numbers that are mostly rounding: of a variance as a mean of squares less the square of a mean."""
        copy = call.operands[0][0]
        if call.name.rstrip("_") in _ROOTS and id(copy) in call.known and call.known[id(copy)].terms is not None:
            exact = call.values[id(copy)]
            off = ((copy.double() - exact).abs() > exact / 2) & (exact > 0)  # what is negative is no square
            self._used("root", call, off, copy, exact)

    def _judge_angles(self, call: _Call) -> None:
        """Sines of angles that are off, because of whole numbers (timesteps, positions) that were rounded, or of a rounding of their own."""
        angles, origin = call.operands[0][0], call.origin
        off = (angles.double() - call.values[id(angles)]).abs()
        finite = off.isfinite()
        error = float(off[finite].max()) if bool(finite.any()) else 0.0
        if error < RADIANS:
            return
        source, fqn = self.here()
        cast = origin.whole and origin.largest >= 1  # else fractions of whole numbers were rounded
        told = RoundedAngles(
            op=origin.op,
            source=origin.source or source,
            dtype=short_name(origin.dtype),
            largest=origin.largest if cast else float(angles[finite].abs().max()),
            error=error,
            apart=origin.apart if cast else None,
        )
        self.session.once(told, (fqn, told.source), fqn)

    def _judge_fraction(self, call: _Call) -> None:
        """What is left of numbers beyond whole ones, or beyond multiples of a period, where they are off by a good part of one: weights of an interpolation, phases."""
        name, (copy, operand) = call.name.rstrip("_"), call.operands[0]
        if id(copy) not in call.known:
            return
        period = call.arguments[0][-1]
        if name == "sub" and len(call.operands) == 2:
            if self._whole_of(call.operands[1][1]) != _key(operand):
                return
            period = 1.0
        elif name not in _PERIODIC or not isinstance(period, (int, float)):
            return
        off = (copy.double() - call.values[id(copy)]).abs()
        self._used("fraction", call, off.isfinite() & (off >= abs(period) / 4), call.results[0], call.exact[0])

    def _whole_of(self, tensor: Tensor) -> int | None:
        """The memory of the numbers of which a tensor holds the whole ones next to them."""
        held, of = self._floors.get(_key(tensor), (None, None))
        return None if held is None or held.expired() else of

    def _follow_whole(self, tensor: Tensor, of: int | None) -> None:
        if of is not None:
            self._floors[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), of
        if len(self._floors) > NUMBERS:
            self._floors.clear()

    def _judge_cast(self, call: _Call) -> None:
        """Whole numbers that are others, and fractions that end up more than one from where they belong."""
        operand, real, origin = call.operands[0][0], call.results[0], call.origin
        if origin.dtype is torch.float32 and not origin.whole:
            return  # a fraction next to a whole number
        values = call.values[id(operand)]
        finite = values.isfinite() & (values.abs() < 2.0**52) & operand.isfinite()
        whole = torch.where(finite, values, 0.0).round()
        meant = bool(finite.all()) and _are_near(values, whole)
        if meant:
            changed, wanted = real.double() != whole, whole.long()
        else:
            wanted = torch.where(finite, values, 0.0).long() if _is_integer(real) else call.exact[0]
            changed = finite & ((real - wanted).abs() > 1)
        if origin.whole and _is_integer(real) and bool((values == whole).all()):
            self._counted(origin, call.line, real, wanted, changed)
        else:
            self._used("whole" if meant else "integer", call, changed, real, wanted)
            self._keep_numbers(call, real, call.exact[0])

    def _keep_numbers(self, call: _Call, real: Tensor, exact: Tensor) -> None:
        """Whole numbers, each next to its own: are there as many different ones as in float64? It matters if something is looked up by them."""
        now, right = (len(values.unique()) for values in (real, exact))
        if call.origin.dtype not in NARROW or right < FEWEST:
            return
        lost, here, there = torch.tensor(right - now), torch.tensor([now]), torch.tensor([right])
        use = partial(self._add, "distinct", str(call.func), call.line, call.origin, lost, here, there, right)
        self._ids[_key(real)] = StorageWeakRef(real.untyped_storage()), use

    def _keep_arrived(self, call: _Call) -> None:
        """Whole numbers that come in half precision, beyond those that this has all of: each may stand for its neighbors. It matters if something is looked up by them."""
        real, dtype = call.operands[0][1], call.operands[0][0].dtype
        beyond = real.abs() > 2 ** NARROW[dtype]
        if not _is_whole(real) or len(real[beyond].unique()) < 2:  # one may be a mark
            return
        largest = int(real.abs().max())
        line = "" if call.line is None else call.line.source
        told = RoundedIndices(
            source="",
            used_at=line,
            dtype=short_name(dtype),
            elements=real.numel(),
            changed=int(beyond.sum()),
            before=largest + 1,
            after=largest,
            arrived=True,
        )
        use = partial(self.session.once, told, line)
        self._ids[_key(call.results[0])] = StorageWeakRef(call.results[0].untyped_storage()), use

    def _look_up(self, func: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Tells of whole numbers by which something is looked up, and follows what is computed with them."""
        for tensor in operands:
            held, use = self._ids.get(_key(tensor), (None, None))
            if held is None or use is None or held.expired():
                continue
            if _name(func).removesuffix("_") in _LOOKUPS:
                del self._ids[_key(tensor)]
                use()
            elif _is_integer(results[0]) or _name(func) in _COPIES:
                self._ids[_key(results[0])] = StorageWeakRef(results[0].untyped_storage()), use
        if len(self._ids) > NUMBERS:
            self._ids.clear()

    def _counted(self, origin: Origin, line: Line | None, real: Tensor, wanted: Tensor, changed: Tensor) -> None:
        """Tells of whole numbers that are others."""
        if not bool(changed.any()):
            return
        first = int(changed.flatten().nonzero()[0])
        told = RoundedIndices(
            source=origin.source,
            used_at="" if line is None else line.source,
            dtype=short_name(origin.dtype),
            elements=real.numel(),
            changed=int(changed.sum()),
            before=int(wanted.flatten()[first]),
            after=int(real.flatten()[first]),
            counted="_to_copy" not in origin.op,
        )
        self.session.once(told, told.source)

    def _judge_real_part(self, call: _Call) -> None:
        """A cast of complex numbers to real ones, of which more than a rounding is imaginary."""
        operand, real = call.operands[0][0] if call.operands else None, call.results[0]
        if call.name == "_to_copy" and operand is not None and operand.is_complex() and real.is_floating_point():
            cut = operand.imag.abs() > torch.finfo(real.dtype).eps * operand.abs()
            self._used("imaginary", call, cut, real, operand)

    def _judge_step(self, call: _Call) -> None:
        """Steps between entries of a grid that coincide, or between two whole numbers."""
        sides = list(call.known.values())
        if call.name != "sub" or not len(sides) == len(call.operands) == 2:
            return
        real, exact = call.results[0], call.exact[0]
        changed, of = (real == 0) & (exact != 0), real.numel()
        if sides[0] is sides[1]:
            entries = [call.values[id(copy)] for copy, _ in call.operands]
            if not (_is_grid(sides[0].exact) or all(map(_is_grid, entries))):
                return
            neighbors = 2 * max(len(sides[0].exact), *(one.numel() for one in entries))  # also of all pairs
            of = min(of, max(neighbors, int(changed.sum())))
        elif not all(side.origin.whole for side in sides):
            return
        self._used("step", call, changed, real, exact, of)

    def _judge_factor(self, call: _Call) -> None:
        """A factor that is 0 only because a number of the program was rounded: 1 - 0.999."""
        for copy, _ in call.operands if call.name in ("mul", "mul_") else ():
            known = call.known.get(id(copy))
            if known is not None and copy.numel() == 1 and known.origin.op == _LIFTED:
                values = call.values[id(copy)]
                self._used("factor", call, ((copy == 0) & (values != 0)).reshape(1), copy, values)

    def _judge_comparison(self, call: _Call) -> None:
        """Masks, and conditions of loops and branches; of a mask, what differs is seen beside the fewer of its two values."""
        real, exact = call.results[0], call.exact[0].bool()
        sides = [call.values.get(id(copy), copy).double() for copy, _ in call.operands]
        sides += [torch.tensor(float(x)) for x in call.arguments[0] if isinstance(x, (int, float))]
        if len(sides) != 2:
            return
        if call.name in ("eq", "ne"):  # of fractions that are rounded it means nothing
            apart = (sides[0] == sides[0].round()) & (sides[1] == sides[1].round())
        else:
            apart = _coarser(sides[0], call.origin.dtype) != _coarser(sides[1], call.origin.dtype)
            lossy = [memory for memory in call.known.values() if memory.origin.is_lossy]
            if lossy and all(map(_is_rounded_number, lossy)):
                apart = torch.ones_like(apart)  # the data is what it is
            elif call.narrowed and not any(memory.origin.op == _DRAWN for memory in call.known.values()):
                apart |= real != call.in_float64(exact=()).bool()
        if real.numel() > 1 and call.origin.whole and all(map(_is_whole, sides)):  # right or wrong, however near
            self._used("compared", call, real != exact, real, exact)
            return
        few = max(1, _fewer(exact)) if real.numel() > 1 else 1
        changed = (real != exact) & apart & sides[0].isfinite() & sides[1].isfinite()
        for (copy, _), chance in zip(call.operands, reversed(sides), strict=False):
            if copy.numel() > 1 and id(copy) in call.known and call.known[id(copy)].origin.op == _DRAWN:
                # what is nearly impossible, or nearly sure, is rounded away: it counts beside such results
                near = 2.0 ** (SLACK - NARROW[copy.dtype])
                never, surely = (((chance - end).abs() < near).expand_as(exact) for end in (0, 1))
                if bool((never | surely).any()):
                    changed = changed & (never | surely)
                    few = max(1, _fewer(exact[never]) + _fewer(exact[surely]))
        few = max(few, int(changed.sum()))  # as where none of float64's mask is True
        self._used("mask" if real.numel() > 1 else "condition", call, changed, real, exact, few)
        if real.numel() == 1 and call.name not in ("eq", "ne"):
            self._used("choice", call, real != exact, real, exact)

    def _judge_schedule(self, memory: _Memory, op: str, line: Line | None) -> None:
        """A schedule that the program has computed from numbers alone, of which entries coincide."""
        key = memory.held.cdata
        if key not in self._generated:
            return
        del self._generated[key]  # once
        memory = self._copied.pop(key, memory)
        if memory.exact.numel() < GRID:
            return
        if memory.origin.dtype not in NARROW or not _is_grid(memory.exact):
            return
        equal = memory.now == torch.cat([memory.now.new_full((1,), torch.nan), memory.now[:-1]])
        # Infinities are equal, too: an overflow, which is told of where it is made
        lost = equal & memory.now.isfinite()
        if bool(lost.any()):
            self._add("schedule", op, line, memory.origin, lost, memory.now, memory.exact, last=True)

    def _lost(self, use: str, memory: _Memory, real: Tensor, exact: Tensor, used_by: str, line: Line | None) -> None:
        """Adds values that are used up to what their line has used so far."""
        finite = real.isfinite() & exact.isfinite()
        right, now = torch.where(finite, exact, 0.0), torch.where(finite, real.double(), 0.0)
        off = (now - right).abs()
        error, size = float(off.square().sum()), float(right.square().sum())
        lost, used_at = memory.origin, "" if line is None else line.source
        key = (use, used_at, lost.source)
        total = self._totals.get(key)
        if total is None:
            if not size or len(self._totals) == MOST_LINES:
                return
            told = RoundedUse(
                use=use,
                op=lost.op,
                source=lost.source,
                made_by=memory.origin.op,
                made_at=memory.origin.source,
                dtype=short_name(memory.origin.dtype),
                value="",
                exact="",
                changed=0,
                of=0,
                used_by=used_by,
                used_at=used_at,
                nonfinite=memory.overflowed,
                difference=memory.terms is not None,
                terms=memory.terms or 0.0,
            )
            total = self._totals[key] = _Total(told)
            self._met_first(key)
        total.errors, total.squares = total.errors + error, total.squares + size
        # A loss that falls is small beside what it was when nothing of it was lost
        is_lost = use == "loss" and error > digits_lost(total.use.dtype) ** 2 * size
        total.uses, total.lost = total.uses + 1, total.lost + is_lost
        changed = int((off > digits_lost(total.use.dtype) * right.abs()).sum())
        total.use = replace(total.use, changed=total.use.changed + changed, of=total.use.of + real.numel())
        if not real.numel():
            return
        at = int(off.argmax())
        shown = replace(total.use, value=_number(real, at), exact=_number(exact, at))
        if is_lost and total.first_lost is None:
            total.first_lost = shown
        # Of numbers that are read a 0 says the least: a difference may be meant to be one
        rank = use != "number" or bool(now.flatten()[at]), float(off.max())
        if rank > total.worst:
            total.worst, total.use = rank, shown

    def _judge_state(self, call: _Call, overwritten: set[int]) -> None:
        """Memory that outlives the call and holds inf where float64 holds finite values."""
        for real, exact in zip(call.results, call.exact, strict=True):
            if id(real) in overwritten and real.is_floating_point():
                self._used("state", call, ~real.isfinite() & exact.isfinite(), real, exact)

    def _used(
        self,
        use: str,
        call: _Call,
        changed: Tensor,
        real: Tensor,
        exact: Tensor,
        of: int | None = None,
    ) -> None:
        """Adds a use to those of its line; ``of`` how many, all where that is not said."""
        origin = call.origin if use != "state" else Origin(str(call.func), call.line, real.dtype, whole=False)
        nonfinite = any(map(call.is_beyond, (copy for copy, _ in call.operands if copy.is_floating_point())))
        nonfinite |= any(bool(result.isnan().any()) for result in call.results if result.is_floating_point())
        self._add(use, str(call.func), call.line, origin, changed, real, exact, of, nonfinite=nonfinite)

    def _add(
        self,
        use: str,
        op: str,
        line: Line | None,
        origin: Origin,
        changed: Tensor,
        real: Tensor,
        exact: Tensor,
        of: int | None = None,
        *,
        last: bool = False,
        nonfinite: bool = False,
    ) -> None:
        key = (use, op, "" if line is None else line.source)
        known = self._uses.get(key)
        if known is None and len(self._uses) == MOST_LINES:
            return
        count = int(changed.sum())
        if known is None or (count and not known.changed):
            self._met_first(key)
        if known is None or count > self._worst[key]:  # of several calls the one that differs most is shown
            self._worst[key] = count
            first = int(changed.flatten().nonzero()[0]) if count else 0
            known = RoundedUse(
                use=use,
                op=op,
                source=key[2],
                made_by=origin.op,
                made_at=origin.source,
                dtype=short_name(origin.dtype),
                value=_number(real, first),
                exact=_number(exact, first),
                changed=known.changed if known is not None else 0,
                of=known.of if known is not None else 0,
                elements=known.elements if known is not None else 0,
                nonfinite=nonfinite,
                difference=origin.cancels,
            )
        of = changed.numel() if of is None else of
        before = (0, 0, 0) if last else (known.changed, known.of, known.elements)
        compared = max(of, changed.numel())
        self._uses[key] = replace(known, changed=before[0] + count, of=before[1] + of, elements=before[2] + compared)


def _chooses_otherwise(call: _Call, real: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Where a choice is another one; and where that is so between values that are not nearly equal in float64."""
    operand = call.operands[0][0]
    values = call.values[id(operand)]
    rough = _coarser(values, call.origin.dtype)
    dim = call.argument("dim")
    if dim is None:
        near, far = (v.flatten()[real] != v.flatten()[exact] for v in (values, rough))
        return near, far
    inside = real.dim() < values.dim()
    at, right = (index.unsqueeze(dim) if inside else index for index in (real, exact))
    far = rough.gather(dim, at) != rough.gather(dim, right)
    if inside:
        return (values.gather(dim, at) != values.gather(dim, right)).squeeze(dim), far.squeeze(dim)
    at, right = at.movedim(dim, -1), right.movedim(dim, -1)  # of several the order says less than which they are
    return (at[..., None] != right[..., None, :]).all(-1) if at.shape[-1] <= FEW_CHOSEN else torch.zeros_like(far), far


def _beside(changed: Tensor, exact: Tensor) -> int:
    """Among how many choices those that have changed are counted: where nearly all choose the same, among those that should not have."""
    if int(changed.sum()) < FEWEST:
        return changed.numel()
    return max(int((exact != exact.flatten().mode().values).sum()), int(changed.sum()))


def _fewer(mask: Tensor) -> int:
    """How often a mask has that of its two values which is rarer."""
    return min(int(mask.sum()), int((~mask).sum()))


def _bits_of_difference(terms: Sequence[Tensor]) -> int:
    """Bits of a difference of two terms that mean something: twice those that they have themselves, of half precision no more than float32 has."""
    bits = 2 * min((_BITS[term.dtype] for term in terms if term.dtype in _BITS), default=24)
    return min(bits, _OF_DATA) if bits < 48 else bits - 4


def digits_lost(dtype: str) -> float:
    """The relative error with which half of the digits of a dtype are lost; of float32 those that float16 has."""
    return math.sqrt(max(DTYPES[dtype].epsilon, DTYPES["float16"].epsilon) / 2)


def _distance(real: Tensor, exact: Tensor) -> float:
    """How far the finite elements are from the exact ones, in the Euclidean norm."""
    return float((real - exact).nan_to_num(0.0, 0.0, 0.0).norm())


def _relative(real: Tensor, exact: Tensor) -> float:
    """The same beside the exact values."""
    size = float(exact.nan_to_num(0.0, 0.0, 0.0).norm())
    return _distance(real.double(), exact) / size if size else 0.0


def _keep_few(memories: dict[int, StorageWeakRef]) -> None:
    """Forgets memories that are gone, or all, where there are many."""
    if len(memories) > NUMBERS:
        for key in [key for key, held in memories.items() if held.expired()] or list(memories):
            del memories[key]


def _small_memories(tensors: Sequence[Tensor]) -> dict[int, StorageWeakRef]:
    storages = [t.untyped_storage() for t in tensors if _is_plain(t) and t.numel() <= SMALL]
    return {memory_key(storage): StorageWeakRef(storage) for storage in storages}


def _is_number(tensor: Tensor) -> bool:
    """Whether a tensor holds one number, and is no element of a larger one."""
    return tensor.dim() == 0 and (not measurable(tensor) or tensor.untyped_storage().nbytes() == tensor.element_size())


def _is_rounded_number(memory: _Memory) -> bool:
    """Whether a number of Python was rounded, and nothing is computed of it yet: a threshold."""
    return memory.is_number and memory.exact.numel() == 1


def _is_held(memories: dict[int, StorageWeakRef], tensor: Tensor) -> bool:
    """Whether the memory of a tensor is one of these, and none that has taken the address of one that is gone."""
    held = memories.get(_key(tensor))
    return held is not None and not held.expired()


def _rounds(call: _Call) -> bool:
    """Whether an operator makes whole numbers of what it is given, each next to its own: a cast to integers, ``round``, ``floor``."""
    if len(call.operands) != 1 or call.results[0].shape != call.operands[0][0].shape:
        return False
    exact, operand = call.exact[0].double(), call.values.get(id(call.operands[0][0]))
    if operand is None or call.results[0].dtype is torch.bool:
        return False
    if call.name == "_to_copy":
        return _is_integer(call.results[0])
    return not _is_whole(operand) and _is_whole(exact) and bool(((exact - operand).abs() < 1).all())


def _are_near(values: Tensor, whole: Tensor) -> bool:
    """Whether values are whole numbers but for what float32 rounds, and not by chance."""
    if torch.equal(values, whole):
        return True
    noise = NOISE * float(whole.abs().max())
    return noise ** min(values.numel(), 8) < CHANCE and bool(((values - whole).abs() <= noise).all())


def _is_grid(values: Tensor) -> bool:
    """Whether each value is larger than the one before, or each is smaller."""
    if values.dim() != 1 or len(values) < 3:
        return False
    steps = values.diff()
    return bool((steps > 0).all() | (steps < 0).all())


def _coarser(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values rounded to the bits that two of them have to differ in for a decision; near 0 a dtype has less of them."""
    smallest = math.frexp(torch.finfo(dtype).tiny)[1]
    unit = torch.exp2((torch.frexp(values).exponent.clamp(min=smallest) - (_BITS[dtype] - SLACK)).double())
    return (values / unit).round() * unit


def _before_rounding(drawn: Tensor, between: Sequence[float], generator: torch.Generator) -> Tensor:
    """Uniform numbers that half precision rounds to these, with some next to both ends.

    torch makes the lower end of what is rounded to the upper one: here it is a number next to the lower one, and the last below the upper one stands for all up to it.
    """
    (low, high), now = map(float, between), drawn.double()
    ends = torch.tensor([low, high], device=drawn.device)
    rest = torch.rand(now.shape, dtype=torch.float64, generator=generator).to(now.device)
    half, last = _spacing(now, drawn.dtype) / 2, _spacing(ends[1].nextafter(ends[0]), drawn.dtype) / 2
    above = torch.where(now + 2 * half >= high, high - now, half)
    below, above = torch.where(now == low, 0.0, half), torch.where(now == low, last, above)
    return (now - below + rest * (below + above)).clamp(low, high)


def _spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """How far the next number of a dtype is."""
    return torch.exp2((torch.frexp(values).exponent - _BITS[dtype]).double())


def _may_round(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether some of the tensors of an operator are in half precision, or it makes real numbers of complex ones or float32 of larger whole ones."""
    if any(tensor.dtype in NARROW for tensor in tensors):
        return True
    if _name(func) != "_to_copy" or not measurable(tensors[-1]):
        return False
    return tensors[0].is_complex() or (tensors[-1].dtype is torch.float32 and _has_more_bits(tensors[0]))


def _are_float32(operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    return results[0].dtype is torch.float32 and results[0].numel() <= SMALL_IN_FLOAT32 and bool(operands)


def _has_more_bits(tensor: Tensor) -> bool:
    """Whether there are numbers beyond the whole ones that float32 has all of."""
    if tensor.dtype not in (torch.int64, torch.int32, torch.float64) or not 0 < tensor.numel() <= SMALL:
        return False
    return tensor.device.type == "cpu" and max(abs(float(end)) for end in tensor.aminmax()) > 2 ** _BITS[torch.float32]


def _are_small(operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    # Few values that are compared with each other make many truth values, of one byte each
    largest = COMPARED if results[0].dtype is torch.bool else SMALL
    widened = sum(t.numel() for t in operands if t.is_floating_point())
    return max(t.numel() for t in results) <= largest and widened <= OPERANDS


@cache
def has_wide_form(func: Any) -> bool:
    """Whether an operator of torch makes something that depends on nothing but its operands."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return not _is_view(func) and not leaves_memory_as_it_was(func)


@cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(func).returns)


@cache
def _name(func: Any) -> str:
    return str(schema_of(func).name).removeprefix("aten::")


def _is_plain(tensor: Tensor) -> bool:
    if measurable(tensor):
        return tensor.element_size() > 1
    return type(tensor) is Tensor and not tensor.is_floating_point() and tensor.layout is torch.strided


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _is_whole(tensor: Tensor) -> bool:
    return _is_integer(tensor) or (tensor.is_floating_point() and bool((tensor == tensor.round()).all()))


def _view(memory: Tensor, like: Tensor) -> Tensor:
    return memory.as_strided(like.shape, like.stride(), like.storage_offset())


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether shapes and all elements are the same; NaN is."""
    if a.shape != b.shape:  # it was turned in place
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _key(tensor: Tensor) -> int:
    try:
        return memory_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors and some wrappers have none
        return 0


def _number(tensor: Tensor, at: int) -> str:
    """One element as text: inf and NaN are no numbers of a trace."""
    return f"{tensor.flatten()[at].item():.6g}" if tensor.numel() else ""
