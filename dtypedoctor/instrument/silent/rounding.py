"""Numbers that rounding has spoilt: activations cast to integers, tables of rotary embeddings, casts to float8 without a scale that would keep more."""

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import buffers_of, schema_of
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.module_tree import ByModule, attribute_of, modules_in
from dtypedoctor.instrument.naming import dtype_name, short_name
from dtypedoctor.instrument.operators import Arguments, tensors_of
from dtypedoctor.instrument.silent.loading import LoadingCheck
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.statistics import measurable, median
from dtypedoctor.trace.records.silent import Float8Cast, FloatToInt, RotaryTable, RoundedUse

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks


LOSSY = 0.1
"""Relative error, in the Euclidean norm, from which on a cast has cut off information: whole numbers in a floating dtype
lose nothing, and the length of a sentence rounded down loses a percent."""

_INDEXING = frozenset(
    {"index", "index_put", "index_put_", "_unsafe_index", "index_select", "index_add", "index_add_", "index_copy",
     "index_copy_", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "embedding", "take", "one_hot",
     "embedding_dense_backward", "_embedding_bag", "nll_loss_forward", "repeat_interleave"}
)  # fmt: skip


@dataclass(slots=True)
class _Cast:
    fqn: str | None
    told: FloatToInt
    as_index: bool = False
    as_number: tuple[str, str | None] | None = None


class IntegerCasts(Observer):
    """Writes a :class:`FloatToInt` for each lossy cast that is used as a number and never as an index.

    Most such casts are meant: token ids, bins, indices, lengths. They are used to look something up or to compare. A cast that
    goes wrong, ``x.to(weight.dtype)`` with a packed weight say, is used as a number: it returns to floating point, by a cast or
    by the next product, and what it cut off is missing there.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._casts: dict[int, _Cast] = {}

    def look_ended(self) -> None:
        """Tells of the casts that were used as numbers only."""
        for cast in {id(cast): cast for cast in self._casts.values()}.values():
            if cast.as_number is not None and not cast.as_index:
                used_by, used_at = cast.as_number
                told = replace(cast.told, used_by=used_by, used_at=used_at)
                self.session.once(told, (cast.fqn, told.source), cast.fqn)
        self._casts.clear()

    def saw(self, seen: Seen) -> None:
        """Notes a lossy cast, or how one is used."""
        if self._casts:
            self._note_use(seen)
        if seen.name != "aten._to_copy.default" or not (seen.operands and seen.results):
            return  # vmap casts numbers by it as well
        source, result = seen.operands[0], seen.results[0]
        is_whole = not (result.is_floating_point() or result.is_complex() or result.dtype is torch.bool)
        if not (is_whole and measurable(source) and source.numel() > 1):
            return

        # how much of the values the cast has cut off
        exact = source.float()
        size = float(exact.norm())
        error = float((exact - result.float()).norm()) / size if 0 < size < math.inf else 0.0
        if error < LOSSY:
            return

        line, fqn = self.here()
        told = FloatToInt(
            op=seen.name,
            source=line,
            from_=dtype_name(source),
            to=dtype_name(result),
            relative_error=error,
            elements=source.numel(),
        )
        self._casts[seen.number(result)] = _Cast(fqn=fqn, told=told)

    def _note_use(self, seen: Seen) -> None:
        used = self._used_by(seen)
        if not used:
            return
        name = schema_of(seen.func).name.removeprefix("aten::")
        numbers = any(measurable(t) for t in seen.results)
        for cast in used:
            if name in _INDEXING:
                cast.as_index = True
            elif numbers and cast.as_number is None:
                cast.as_number = (seen.name, self.here()[0])
            elif not numbers:
                # Integers made of integers say no more than these did; a truth value says something else.
                for result in tensors_of(seen.results):
                    if result.dtype is not torch.bool:
                        self._casts[seen.number(result)] = cast

    def _used_by(self, seen: Seen) -> list[_Cast]:
        """The casts that made operands of an operator."""
        numbers = [seen.number(t) for t in seen.operands if not t.is_floating_point()]
        return [self._casts[number] for number in numbers if number in self._casts]


SHORTEST_TABLE, LONGEST_TABLE = 4, 1024
"""Lengths of tables; half the size of an attention head."""
TOLERANCE = 0.012
"""Relative deviation of a factor between neighbours from the usual one; bfloat16's rounding makes up to 0.008."""
USUAL = 0.6
"""Share of neighbours that have the usual factor; tables for long contexts bend in between."""
EXACT = 1e-6
POSITION = 4096
"""Where the angle error is given, if the model has so many positions."""


_COPIES = frozenset({"_to_copy", "clone", "contiguous"})
_MULTIPLY = frozenset({"mul", "mm", "bmm", "ger", "outer"})
"""Operators that make angles of frequencies and positions."""

_Held = tuple[ref[nn.Module], str, torch.dtype]
"""The owner of a buffer, its name there, and the dtype that it had when it was looked at."""


@dataclass(slots=True)
class _Table:
    name: str
    buffer: Tensor
    told: RotaryTable
    memory: int


class RotaryTables(Observer):
    """Writes a :class:`RotaryTable` for each rounded table of frequencies that is read.

    A table is recognised by its values and not by its name: positive, falling, each a constant factor of the one before. One that
    was computed in float32 never equals its own rounding to bfloat16 or float16 (unless all its values are powers of two); one
    that went through ``model.to(bfloat16)`` does, also after ``float()``.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._known: ByModule[list[_Held]] = ByModule()
        self._waiting: list[_Table] = []
        self._read: set[int] = set()
        # by the memory of a copy of a table: the copy, which keeps that memory from being another tensor's, and the memory of the table
        self._copies: dict[int, tuple[Tensor, int]] = {}
        # by the memory of a table, the largest number that it was multiplied by
        self._used: dict[int, float] = {}
        self._looked = False

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins; at the first one of a module, and when it was cast since, its buffers are looked through."""
        held = self._known.get(module)
        if self.session.position.backward_depth or (held is not None and not any(map(_was_cast, held))):
            return
        with self.session.position.aside():
            found = list(self._buffers(module))
            self._known[module] = [(ref(owner), name.rpartition(".")[2], b.dtype) for name, b, owner in found]
            self._waiting = []
            for name, buffer, owner in found:
                table = _rounded(name, buffer, _last_position(owner, module))
                if table is not None:
                    source = self.checks[LoadingCheck].rounded_at(owner, name.rpartition(".")[2])
                    table.told = replace(table.told, source=source)
                    self._waiting.append(table)

    def after_call(self, module: nn.Module) -> None:
        """The outermost call has ended: tells of tables that were read, or of all where nobody looked."""
        waiting, self._waiting = self._waiting, []
        for table in waiting:
            if self._looked and table.memory not in self._read:
                continue
            told = replace(table.told, read=True if self._looked else None)
            used = self._used.get(table.memory)
            if used is not None:
                told = replace(told, used=used)
            # a text that is generated grows: told again each time that its last position has doubled
            self.session.once(told, (table.name, round(math.log2(used)) if used else 0), table.name.rpartition(".")[0])
        self._read.clear()
        self._copies.clear()
        self._used.clear()
        self._looked = False

    def saw(self, seen: Seen) -> None:
        """Notes which tables an operator reads."""
        self._looked = True
        if not self._waiting:
            return
        operands = list(filter(measurable, seen.operands))
        self._read.update(map(_memory, operands))
        of = list(map(self._copied_from, operands))
        read = next(filter({table.memory for table in self._waiting}.__contains__, of), None)
        if read is None:
            return
        name = schema_of(seen.func).name.removeprefix("aten::")
        if name in _COPIES:
            self._copies.update((_memory(copy), (copy, read)) for copy in filter(measurable, seen.results))
        elif name in _MULTIPLY:
            self._used[read] = max(self._used.get(read, 0.0), _largest_but(read, zip(of, operands, strict=True)))

    def _copied_from(self, tensor: Tensor) -> int:
        """The memory that a tensor is a copy of; its own where it is none."""
        memory = _memory(tensor)
        return self._copies[memory][1] if memory in self._copies else memory

    def _buffers(self, module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
        """Name, buffer and owner of everything in ``module`` that may be a table by its shape."""
        inside = {id(child) for child in modules_in(module)}
        for _, name, tensor, owner, is_buffer in self.session.names.tensors():
            may_be = tensor.dim() == 1 and SHORTEST_TABLE <= len(tensor) <= LONGEST_TABLE
            if is_buffer and may_be and measurable(tensor) and id(owner) in inside:
                yield name, tensor, owner


def _was_cast(held: _Held) -> bool:
    owner, name, dtype = held
    module = owner()
    buffer = buffers_of(module).get(name) if module is not None else None
    return buffer is not None and buffer.dtype is not dtype


def _last_position(owner: nn.Module, outermost: nn.Module) -> int:
    """The position that an angle is given at: none that the model does not have. Of a model with several parts, the table's own configuration says it."""
    configs = (attribute_of(module, "config") for module in (owner, outermost))
    known = (getattr(config, "max_position_embeddings", None) for config in configs)
    return next((most for most in known if isinstance(most, int) and 0 < most < POSITION), POSITION)


def _rounded(name: str, buffer: Tensor, position: int) -> _Table | None:
    rounded_to = next(
        (d for d in (torch.bfloat16, torch.float16) if torch.equal(buffer, buffer.to(d).to(buffer.dtype))), None
    )
    values = buffer.double().tolist() if rounded_to is not None else []
    if rounded_to is None or not _is_geometric(values):
        return None
    # The largest relative and absolute deviation from the geometric progression that goes on from the first value, which is 1 in most tables, as near to
    # all others as it can: each is rounded, the last one too. For a table that bends, a deviation below bfloat16's spacing is assumed: what half of the
    # last place amounts to.
    places = range(len(values))
    slope = sum(i * math.log(v / values[0]) for i, v in enumerate(values)) / sum(i * i for i in places)
    exact = [values[0] * math.exp(slope * i) for i in places]
    relative = max(abs(v / e - 1.0) for v, e in zip(values, exact, strict=True))
    if relative > TOLERANCE:
        deviation, error = 2.0**-9, max(values) * 2.0**-9
    else:
        deviation, error = relative, max(abs(v - e) for v, e in zip(values, exact, strict=True))
    if deviation < EXACT:
        return None
    told = RotaryTable(
        name=name,
        dtype=dtype_name(buffer),
        rounded_to=short_name(rounded_to),
        length=len(values),
        first=values[0],
        last=values[-1],
        deviation=deviation,
        angle_error=error * position,
        position=position,
    )
    return _Table(name, buffer, told, _memory(buffer))


def _is_geometric(values: list[float]) -> bool:
    if not all(math.isfinite(v) and 0.0 < v <= 1.0 for v in values):
        return False
    factors = [after / before for before, after in pairwise(values)]
    usual = median(factors)
    if max(factors) >= 1.0 or usual < 0.05:
        return False
    return sum(abs(f / usual - 1.0) <= TOLERANCE for f in factors) >= USUAL * len(factors)


def _largest_but(memory: int, tensors: Iterable[tuple[int, Tensor]]) -> float:
    """The largest number in tensors that are not of ``memory``."""
    others = (tensor.detach() for other, tensor in tensors if other != memory and tensor.numel())
    return max((float(other.abs().max()) for other in others), default=0.0)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


RANGED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16)
"""Dtypes of less range than float32."""
_CASTS = {"aten._to_copy.default": 0, "aten.copy_.default": 1}
"""Operators that cast, with the place of what is cast among their operands."""
LOSSY_FLOAT8 = 0.25
"""Relative error, in the Euclidean norm, from which on a cast has lost information; float8's rounding makes up to 0.06."""
MOST = 1 << 20
"""Elements of a tensor that are measured, its first ones."""
HELPED = 4.0
"""So many times smaller the error is with a scale, where a scale is what the cast lacks: outliers defeat one, too."""


class CastsOfLessRange(Observer):
    """Writes a :class:`Float8Cast` for each cast of finite values to float8 that loses much more than it would with a scale, and a :class:`RoundedUse` for one to float16.

    The experiment is the same cast of the same values, multiplied by the dtype's largest value over their absmax before it, and divided
    after it, as float8 recipes do. A cast whose result is not finite is the watch's. Outside of modules a GPU's memory is looked
    at in the steps in which it is read.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._looking = self.session.guard.keeping("casts to dtypes of less range outside of modules")

    def saw(self, seen: Seen) -> None:
        """An operator has run inside of a module that is looked at."""
        place = _CASTS.get(seen.name)
        if place is None or not seen.results or len(seen.operands) <= place:
            return
        if seen.results[0].dtype is torch.float16 and not self.session.readings.at_hand(seen.operands[place]):
            return  # autocast casts each weight, and each would be waited for
        told = _lossy(seen.name, seen.operands[place], seen.results[0])
        if told is not None:
            self._tell(told, *self.here())

    def follows(self, func: Any) -> bool:
        """Whether an operator casts."""
        return str(func) in _CASTS

    def ran(self, func: Any, arguments: Arguments, result: Any) -> None:
        """A tensor was cast outside of modules."""
        place, written = _CASTS[str(func)], arguments[0]
        operand = written[place] if len(written) > place else None
        if not isinstance(operand, Tensor) or not isinstance(result, Tensor):
            return
        if result.dtype in RANGED and self.session.readings.reads(operand):
            with self._looking, self.session.position.aside():
                told = _lossy(str(func), operand, result)
                if told is not None:
                    self._tell(told, source_of(sys._getframe()), None)

    def _tell(self, told: Float8Cast, source: str | None, fqn: str | None) -> None:
        if told.to != "float16":
            self.session.once(replace(told, source=source), (fqn, source), fqn)
        elif told.vanished > told.clipped and not self.position.backward_depth:  # of gradients others tell
            use = RoundedUse(
                use="vanished",
                op=told.op,
                source=source or "",
                made_by=told.op,
                made_at=source or "",
                dtype=told.to,
                value="0",
                exact=f"{told.absmax:.6g}",
                changed=told.vanished,
                of=told.elements,
            )
            self.session.once(use, (use.use, fqn, source), fqn)


def _lossy(op: str, source: Tensor, result: Tensor) -> Float8Cast | None:
    """What a cast to a dtype of less range has lost; None where that is little, where a scale would not help, and for other casts."""
    if result.dtype not in RANGED or not measurable(source) or source.dtype.itemsize < 2 or source.numel() < 2:
        return None
    if source.shape != result.shape or source.device != result.device:  # a copy that broadcasts, or from elsewhere
        return None
    exact, cast = (tensor.detach().reshape(-1)[:MOST].float() for tensor in (source, result))
    found = _measured(exact, cast, result.dtype)
    if found is None or found["relative_error"] < max(LOSSY_FLOAT8, HELPED * found["scaled_error"]):
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
